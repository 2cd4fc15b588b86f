"""The attempts of a run: each start of its workers, from where to where it came, and how it ended.

``run.json`` has them under "attempts", the last one last. One that has no end was killed together with all that could
have written it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes import record

_JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
_OWN = "recipes.launchers."  # launchers of this package are known by the names of their modules


def engine(config: Mapping[str, Any]) -> str:
    """What starts the run's workers: one of this package's launchers, or the name of another class."""
    target = str(config["cluster"]["_target_"])
    return target.removeprefix(_OWN).split(".")[0] if target.startswith(_OWN) else target


def begin(folder: Path, config: Mapping[str, Any]) -> None:
    """Note that the workers have started. Rank 0 calls it."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    record.begin_attempt(
        folder,
        engine=engine(config),
        job_id=next(filter(None, map(os.environ.get, _JOB_IDS)), None),
        rendezvous=f"{address}:{port}" if address and port else None,
        resumed_from=None,
    )


class RecordAttempt(Callback):
    """Writes from which step to which the attempt has come, at the latest when a checkpoint is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, from_step=trainer.global_step)

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer, **more: int) -> None:
        if trainer.is_global_zero:
            with suppress(OSError):  # a full disk ends no run here, nor hides the error of one
                record.update_attempt(self.folder, to_step=trainer.global_step, **more)
