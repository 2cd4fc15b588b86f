"""Reports while a model trains: its speed, how much of the hardware it uses, and the memory of each rank.

Each rank counts by itself, on the host. At every ``log_every_n_steps`` it leaves its figures where rank 0 finds them,
and rank 0 logs them. No rank waits for another one, or for a GPU::

    rank 1    batch 9   memory 1.1 GiB  ->  noticeboard
    rank 0    batch 9   memory 1.2 GiB  ->  noticeboard  ->  loggers, progress bar
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_parallel.batch import samples_of
from lightning_parallel.private.lightning.batches import ends_update
from lightning_parallel.private.lightning.metrics import logged_step, show_in_progress_bar
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.ranks.notice import Noticeboard

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_BACKWARDS = 2  # a backward computes as much as two forwards
_EACH = 64  # ranks; the memory of more isn't logged one by one


class PerformanceMonitor(Callback):
    """Logs what a training achieves, at every ``log_every_n_steps``, and shows it in the progress bar.

    ======================  ===========================================================================================
    ``tokens_per_second``   or ``samples_per_second``: of all replicas, without validation. A batch has tokens if an
                            integer tensor [batch, time] is in it; padding counts.
    ``mfu``                 model FLOPs utilisation, between 0 and 1: the operations of forwards, and twice as many for
                            backwards, by torch's formulas, over the peak of all devices. What is computed again for
                            ``activation_checkpointing`` doesn't count. Batches of other sizes count by their tokens.
                            Left out where operations or the peak aren't known, or it would be above 1.
    ``memory_gib/rank3``    of each rank: resident in host memory; on a GPU the most that was allocated so far. Of more
                            than 64 ranks, ``memory_gib/highest`` alone.
    ======================  ===========================================================================================

    The first batch counts in none of them, since much is made in it. For ``mfu``, pipelines of several stages count
    operations in their dry run of the step before training. Elsewhere a module gives ``flops_per_batch``, a number or a
    function, of a replica's batch with the backward, as for Lightning's ``ThroughputMonitor``; this comes first.

    Args:
        peak_flops: the FLOP/s of one device in the run's precision; None: by the data sheet of a GPU that Lightning
            knows. Of other devices, a CPU too, no peak is known.

    Raises:
        ValueError: ``peak_flops`` is no positive number.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops={peak_flops}: give the FLOP/s of one device, or leave it out.")
        self._given_peak = peak_flops
        self._peak: float | None = None  # of one device
        self._board: Noticeboard | None = None
        self._flops: float | None = None  # of one token or sample, on all ranks of a replica, if it is known
        self._unit, self._count = "samples", 0  # what batches hold, and how much since the last log
        self._since: float | None = None  # of the clock; None before the first batch has ended
        self._paused = 0.0

    # -- a run ---------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = self._flops = None
        self._count = 0
        self._peak = self._given_peak or _peak_of(trainer)
        self._board = Noticeboard() if trainer.world_size > 1 else None
        if self._board is not None:
            self._board.leave(memory_in_use(trainer.strategy.root_device))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unit, count = content(batch)
        if self._since is None:
            self._flops = self._flops_of_one(trainer, pl_module, count)
            self._begin_interval()
            return
        self._count += count
        step = logged_step(trainer)
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval and (step + 1) % interval == 0 and ends_update(trainer):
            self._log(trainer, step, time.monotonic() - self._since)
            self._begin_interval()

    def _flops_of_one(self, trainer: pl.Trainer, module: nn.Module, count: int) -> float | None:
        """The operations for one token or sample, given their number in the first batch."""
        if count == 0:  # an image without objects
            return None
        given = getattr(module, "flops_per_batch", None)
        if given is not None:
            return float(given() if callable(given) else given) / count
        forward = getattr(trainer.strategy, "forward_flops", None)
        return None if forward is None else (1 + _BACKWARDS) * forward() / count

    def _begin_interval(self) -> None:
        self._since, self._count = time.monotonic(), 0

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._since is not None:
            self._since += time.monotonic() - self._paused

    # -- figures -------------------------------------------------------------------------------------------------

    def _log(self, trainer: pl.Trainer, step: int, seconds: float) -> None:
        own = memory_in_use(trainer.strategy.root_device)
        if self._board is not None:
            self._board.leave(own)
        if not trainer.is_global_zero:
            return
        everyone = [own] if self._board is None else self._board.read()
        if everyone:
            figures = self._figures(trainer, seconds, [nbytes / 2**30 for nbytes in everyone])
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)
            show_in_progress_bar(trainer, _texts(figures, self._unit))

    def _figures(self, trainer: pl.Trainer, seconds: float, memory: list[float]) -> dict[str, float]:
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)  # they get different batches
        rate = replicas * self._count / seconds
        figures = {f"{self._unit}_per_second": rate}
        if self._flops and self._peak:
            mfu = rate * self._flops / (self._peak * trainer.world_size)
            figures |= {"mfu": mfu} if 0 < mfu <= 1 else {}  # more would only say that the peak isn't one
        if len(memory) > _EACH:
            return figures | {"memory_gib/highest": max(memory)}
        return figures | {f"memory_gib/rank{rank}": value for rank, value in enumerate(memory)}


def _peak_of(trainer: pl.Trainer) -> float | None:
    """The highest FLOP/s of this rank's device by its data sheet, if it is known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    with trainer.precision_plugin.forward_context():
        autocast = torch.is_autocast_enabled(device.type)
        return get_available_flops(
            device, torch.get_autocast_dtype(device.type) if autocast else torch.get_default_dtype()
        )


def _texts(figures: dict[str, float], unit: str) -> dict[str, str]:
    """The texts for the progress bar."""
    texts = {f"{unit}/s": f"{figures[f'{unit}_per_second']:,.0f}"}
    texts |= {"mfu": f"{figures['mfu']:.1%}"} if "mfu" in figures else {}
    highest = max(value for name, value in figures.items() if name.startswith("memory_gib/"))
    return texts | {"memory": f"{highest:.2f} GiB"}


def content(batch: Any) -> tuple[str, int]:
    """The unit and amount of a batch's content: tokens if it has an integer tensor ``[batch, time]``, otherwise
    samples."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in _INTEGERS:
            return "tokens", leaf.numel()
    samples = samples_of(batch)
    return ("batches", 1) if samples is None else ("samples", samples)


def memory_in_use(device: torch.device) -> int:
    """Bytes: on a GPU the most that this process had in tensors so far, otherwise its resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # Linux has this file
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
