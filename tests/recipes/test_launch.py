"""Whole programs: recipes/train.py, launchers/local.py and worker.py together. Few, since each starts processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

from recipes import record
from recipes.launchers.launcher import WorkersFailed
from recipes.launchers.local import LocalLauncher
from recipes.train import main
from tests.recipes.test_configs import composed

TINY = [
    "model=mlp", "data=digits", "model.width=16", "data.batch_size=12",
    "trainer.max_steps=2", "trainer.limit_val_batches=2",
    "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip


class FailsOnRankOne(L.LightningModule):
    """Rank 1 raises in its first step; the others wait for it in a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if rank_zero_only.rank == 1:
            raise ValueError("no luck today")
        dist.barrier()
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_two_replicas(folder: Path, module: str, *words: str) -> Path:
    """The config of a run of a module."""
    config = composed("strategy=ddp", "callbacks=none", "logger=none", *TINY, *words, folder=folder)
    config["model"] = {"_target_": module}
    (folder / record.CONFIG).write_text(yaml.safe_dump(config))
    return folder / record.CONFIG


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Folder name -> run.json."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.rglob(record.RUN))}


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that name ``folder``."""
    listing = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line]


@pytest.mark.programs
def test_a_failing_rank_is_named_and_the_launcher_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file = of_two_replicas(tmp_path, "tests.recipes.test_launch.FailsOnRankOne")
    environment = dict(os.environ)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(WorkersFailed, match="ValueError: no luck today") as raised:
        LocalLauncher(devices=2, threads=1).launch(config_file, processes=2)
    # And rank 0 has ended, which waited in a collective that would end after half an hour.
    assert (raised.value.failure.rank, raised.value.failure.place) == (1, "replica 1 of 2")
    told = str(raised.value)
    assert told.startswith("rank 1 of 2 (replica 1 of 2) failed:") and told.count("no luck today") == 2  # source line
    assert "fit_loop.py" not in told
    errors = {file.name: file.read_text() for file in (tmp_path / record.ERRORS).iterdir()}
    assert errors["rank-1.txt"].count("fit_loop.py") > 0 and set(errors) <= {"rank-0.txt", "rank-1.txt"}
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert list(scratch.iterdir()) == []
    assert processes_of(tmp_path) == []


def test_a_config_with_problems_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "strategy=pipelin", "model=gtp", f"paths.log_dir={tmp_path}/logs"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="(?s)^2 problems .*no such strategy; did you mean pipeline_"):
        main()
    assert list(tmp_path.iterdir()) == []
