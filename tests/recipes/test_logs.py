"""The logs of a run that was killed and resumed are those of a run that wasn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_parallel import ExactResume, ResumableDataLoader
from recipes.logs import ContinuedCSVLogger, ContinuedLogs, read

STEPS, SAVED, KILLED = 12, 6, 9


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch).sum())

    def train_dataloader(self) -> Any:
        return ResumableDataLoader(torch.arange(12 * 32.0).reshape(12, 32) / 400, batch_size=1)

    val_dataloader = train_dataloader


class Killed(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED:
            for logger in trainer.loggers:
                logger.save()  # more than the checkpoint knows of has been written
            raise SystemExit


def run(folder: Path, *, steps: int = STEPS, resume: bool = False, killed: bool = False) -> None:
    torch.manual_seed(0)
    loggers = [kind(folder, name=name, version="") for kind, name in (
        (ContinuedCSVLogger, "csv"), (TensorBoardLogger, "tensorboard")
    )]  # fmt: skip
    keeper = ModelCheckpoint(folder, "saved", every_n_train_steps=SAVED, save_top_k=-1)
    callbacks = [keeper, ExactResume(), ContinuedLogs(), *([Killed()] if killed else [])]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=loggers, callbacks=callbacks, log_every_n_steps=1,
        val_check_interval=4, limit_val_batches=2, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Logs(), ckpt_path=folder / "saved.ckpt" if resume else None)


def rows(folder: Path) -> list[tuple[str, ...]]:
    return [(row["step"], row["loss"], row.get("val", "")) for row in read(folder / "csv")]


def events(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


@pytest.mark.filterwarnings("error:Experiment logs directory")
def test_logs_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "twice", killed=True)
    assert int(rows(tmp_path / "twice")[-1][0]) == KILLED - 2  # that of the killed batch is logged after it
    run(tmp_path / "twice", resume=True)
    assert rows(tmp_path / "twice") == rows(tmp_path / "whole") and len(rows(tmp_path / "whole")) == STEPS + STEPS // 4
    for name in ("loss", "val"):
        assert events(tmp_path / "twice", name) == events(tmp_path / "whole", name)


def test_a_row_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("loss,step,val\n0.5,0,\n0.25")
    assert read(tmp_path) == [{"loss": "0.5", "step": "0", "val": ""}]
    assert read(tmp_path / "none") == []
