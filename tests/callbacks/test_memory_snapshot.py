"""A snapshot of each rank's memory is written at the end of a training and at an error; without a GPU it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parallel import MemorySnapshot
from lightning_parallel.callbacks import memory_snapshot


class Fails(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


def fit(module: L.LightningModule, folder: Path, accelerator: str = "cpu") -> None:
    L.Trainer(
        accelerator=accelerator, devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[MemorySnapshot()], default_root_dir=folder,
    ).fit(module)  # fmt: skip


def test_without_a_gpu_it_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_snapshot=true.*this run is on cpu: leave it out"):
        fit(BoringModel(), tmp_path)


@pytest.mark.parametrize("module", [BoringModel(), Fails()])
def test_it_is_written_at_the_end_and_at_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: L.LightningModule
) -> None:
    """There is no GPU here: what torch would be asked for is written down."""
    asked: list[Any] = []
    monkeypatch.setattr(MemorySnapshot, "setup", lambda *args, stage: None)
    monkeypatch.setattr(memory_snapshot, "record_memory_history", asked.append)
    monkeypatch.setattr(memory_snapshot, "write_memory_history", asked.append)
    with pytest.raises(torch.OutOfMemoryError) if isinstance(module, Fails) else nullcontext():
        fit(module, tmp_path)
    assert asked == [100_000, tmp_path / "memory_rank0.pickle", None]


def test_a_snapshot_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning calls callbacks before the strategy, which has to close its groups."""

    def fails(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(MemorySnapshot, "setup", lambda *args, stage: None)
    monkeypatch.setattr(memory_snapshot, "record_memory_history", lambda entries: None)
    monkeypatch.setattr(memory_snapshot, "write_memory_history", fails)
    with (
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
        pytest.warns(UserWarning, match="could not be written: No space left"),
    ):
        fit(Fails(), tmp_path)


@pytest.mark.gpu
def test_on_a_gpu_it_is_a_file_that_can_be_opened(tmp_path: Path) -> None:
    fit(BoringModel(), tmp_path, "gpu")
    assert (tmp_path / "memory_rank0.pickle").stat().st_size > 0
