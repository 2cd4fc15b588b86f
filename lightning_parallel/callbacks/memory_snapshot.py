"""What takes a GPU's memory: each allocation of a training, with the lines of code that made it."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parallel.private.torch import record_memory_history, write_memory_history

_ENTRIES = 100_000


class MemorySnapshot(Callback):
    """Records what takes the memory of each rank's GPU while it trains: the last 100,000 allocations and releases, with
    the lines of code that made them. Each rank writes its record when training ends, or when an error ends it, such as
    out of memory. The files, ``memory_rank0.pickle`` and so on, are in the logger's directory, or else in the Trainer's
    ``default_root_dir``. <https://docs.pytorch.org/memory_viz> shows them.

    Raises:
        ValueError: before training, if the run is on no GPU.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if stage == "fit" and device.type != "cuda":
            raise ValueError(
                f"MemorySnapshot (in the recipes, memory_snapshot=true) records the memory of GPUs, but this run is on "
                f"{device}: leave it out, or train on a GPU."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)  # all ranks ask: one of them knows
        record_memory_history(_ENTRIES)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            self._write(trainer)
        except Exception as error:  # any: the run's own error is to be seen, and the strategy has to close its groups
            rank = trainer.global_rank
            warnings.warn(f"The memory snapshot of rank {rank} could not be written: {error}", stacklevel=2)

    def _write(self, trainer: pl.Trainer) -> None:
        if self._directory is None:
            return
        directory, self._directory = self._directory, None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_memory_history(directory / f"memory_rank{trainer.global_rank}.pickle")
        finally:
            record_memory_history(None)
        rank_zero_info(f"Memory snapshots are in {directory}. https://docs.pytorch.org/memory_viz shows them.")
