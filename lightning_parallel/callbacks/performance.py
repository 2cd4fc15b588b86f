"""The inputs of a run's figures: the content of a batch, a process's memory, a step's operations, a device's peak, and
a board for the ranks' figures."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_parallel.batch import batch_size
from lightning_parallel.private.torch import default_store, tree_leaves
from lightning_parallel.ranks.collectives import guarded
from lightning_parallel.timeline.recording import Timeline

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TIMED = 0.1  # seconds, in which a device's speed is measured


@dataclass(frozen=True)
class StageFigures:
    """A pipeline's own figures.

    Attributes:
        forward_flops: the floating-point operations of the forwards of a replica's batch, by torch's formulas.
        bubble: computes the fraction of the stages' time that the schedule leaves idle, in theory.
        staleness: by how many updates this rank's gradients were late so far, on average; None where none is late.
    """

    forward_flops: float
    bubble: Callable[[], float]
    timeline: Timeline
    staleness: float | None


def content(batch: Any) -> tuple[str, int]:
    """The unit and amount of a batch's content: tokens if it has an integer tensor ``[batch, time]``, otherwise
    samples."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in _INTEGERS:
            return "tokens", leaf.numel()
    try:
        return "samples", batch_size(batch)
    except ValueError:  # whatever it is, the step takes it
        return "batches", 1


def memory_in_use(device: torch.device) -> int:
    """Bytes: on a GPU the most that this process had in tensors so far, otherwise its resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):  # Linux has this file
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)


def peak_of(trainer: pl.Trainer) -> float:
    """The highest FLOP/s that this rank can reach: for GPUs that Lightning knows by their data sheets, for others as
    measured with products of matrices. Ranks that share a GPU, or the cores of a CPU, share its peak."""
    device = trainer.strategy.root_device
    with trainer.precision_plugin.forward_context():
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else torch.get_default_dtype()
        known = get_available_flops(device, dtype) if device.type == "cuda" else None
        peak = float(known or flops_per_second(device))
    devices = getattr(trainer.strategy, "parallel_devices", None) or [device]
    return peak * share_of(device, devices.count(device))


def flops_per_second(device: torch.device) -> float:
    """The most that a device reaches in matrix products, in FLOP/s (an addition and a multiplication are two), in the
    dtype that autocast or the default says. A model's own layers are slower.

    Other processes take a core away for milliseconds, so it is the best of many products, each timed by itself.
    """
    sizes, repeated = ((4096,), 4) if device.type == "cuda" else ((256, 512), 1)  # of one core, of many
    matrices = [torch.ones(size, size, device=device) for size in sizes]
    best, end = 0.0, time.perf_counter() + _TIMED
    while True:
        for a in matrices:
            float((a @ a)[0, 0])  # warms up, and leaves a GPU nothing to do
            begin = time.perf_counter()
            for _ in range(repeated):
                c = a @ a
            float(c[0, 0])  # waits for it
            now = time.perf_counter()
            best = max(best, repeated * 2 * len(a) ** 3 / (now - begin))
        if now > end:
            return best


def share_of(device: torch.device, ranks: int) -> float:
    """Which part of the speed that one rank measures each has, if so many compute on the device at once: of a CPU all
    of it, as long as there are cores for the threads of all."""
    if device.type != "cpu":
        return 1 / ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(1.0, cores / (ranks * torch.get_num_threads()))


class Noticeboard:
    """A board where each rank leaves its figures, and rank 0 reads those of all. It is the store where the processes
    have met, so nobody waits for another one. Ranks may be at different batches: the figures may be a log interval old.

    All ranks make it, and leave their first figures before one reads.
    """

    def __init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        store = default_store()
        run = store.add(f"lightning_parallel/figures_of/{self._rank}", 1)
        self._store = PrefixStore(f"lightning_parallel/figures/{run}", store)

    def leave(self, figures: Mapping[str, float]) -> None:
        """Leave this rank's figures, in the place of earlier ones."""
        guarded(self._store.set, str(self._rank), json.dumps(figures))

    def read(self) -> list[dict[str, float]]:
        """The figures of all ranks, in their order; empty as long as a rank hasn't left any."""
        keys = [str(rank) for rank in range(self._ranks)]
        if not guarded(self._store.check, keys):
            return []
        return [json.loads(text) for text in guarded(self._store.multi_get, keys)]
