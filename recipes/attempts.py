"""What workers write into ``run.json``: where each rank is, and the attempts of a run.

An attempt is a start of the workers, from where to where it came, and how it ended. The last one is last. One that has
no end was killed together with all that could have written it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_parallel.ranks.layout import Layout
from recipes import record

_JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
_OWN = "recipes.launchers."  # launchers of this package are known by the names of their modules


def begin(folder: Path, config: Mapping[str, Any]) -> None:
    """Note that the workers have started. Rank 0 calls it."""
    target = str(config["cluster"]["_target_"])
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    record.begin_attempt(
        folder,
        engine=target.removeprefix(_OWN).split(".")[0] if target.startswith(_OWN) else target,
        job_id=next(filter(None, map(os.environ.get, _JOB_IDS)), None),
        rendezvous=f"{address}:{port}" if address and port else None,
        resumed_from=None,
    )


class Recorder(Callback):
    """Writes which rank is where and on what data, and from which step to which the attempt has come: at the latest
    when a checkpoint is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mine = {
            "rank": trainer.global_rank,
            "host": socket.gethostname(),
            "device": str(trainer.strategy.root_device),
            "coordinates": coordinates(trainer),
        }
        ranks: list[Any] = [mine]
        if dist.is_initialized():
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, mine)
        if trainer.is_global_zero:
            data = getattr(getattr(trainer, "datamodule", None), "fingerprint", None)
            record.update(self.folder, layout={"world_size": trainer.world_size, "ranks": ranks}, data=data)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, from_step=trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer, **more: int) -> None:
        if trainer.is_global_zero:
            with suppress(OSError):  # a full disk ends no run here, nor hides the error of one
                record.update_attempt(self.folder, to_step=trainer.global_step, **more)


def coordinates(trainer: L.Trainer) -> dict[str, int]:
    """This rank's place on every axis."""
    layout = getattr(trainer.strategy, "layout", None)
    if not isinstance(layout, Layout):  # of Lightning's strategies
        layout = Layout.resolve(trainer.world_size, trainer.global_rank, data=trainer.world_size)
    return {axis.name: layout.index(axis.name) for axis in layout.axes}
