"""``schedule="auto"`` in a run: what schedules would cost with the model, the device's speed and its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_parallel.layout import Layout, Placement
from lightning_parallel.parts.cutting import Partitions
from lightning_parallel.pipeline.actions import Schedule
from lightning_parallel.pipeline.choosing import choose, estimate, reason
from lightning_parallel.pipeline.partition import Partition

_OVERHEAD = 1e-3  # seconds that an action takes besides its layers: docs/figures.md; a message is taken to cost as much
_TIMED = 0.1  # seconds, in which a device's speed is measured
_COPIES = 4  # a parameter, its gradient, and an optimizer's two moments
_USABLE = 0.8  # of what they leave: the rest is for what an estimate leaves out


def suitable_placement(
    found: Partitions,
    names: Mapping[Placement, str],
    schedules: Mapping[Placement, Schedule],
    *,
    speed: float,
    halves: bool,
    recompute: bool,
    free: int,
    microbatches: int,
) -> Placement:
    """Where the chunks are of the schedule that suits the model. The first rank says which, and why.

    Args:
        found: the partitions, or why one isn't possible.
        names: of the schedules, by where their chunks are.
        schedules: their lists.
        speed: what a stage does of the partitions' ``work`` in a second.
        halves: second halves of backwards run where the schedule has them.
        recompute: layers run again in the backward.
        free: the bytes that a stage has for activations.
        microbatches: of a batch.
    """
    parts = {names[placement]: each for placement, each in found.items() if isinstance(each, Partition)}
    estimates = {
        name: estimate(schedules[each.placement], each, _OVERHEAD * speed, halves=halves, recompute=recompute)
        for name, each in parts.items()
    }
    name = choose(estimates, free)
    refused = [f" Not {names[place]!r}: {text}" for place, text in found.items() if isinstance(text, str)]
    seconds = (3 + recompute) * sum(parts[name].work) / parts[name].stages / speed
    costs = (
        f" A microbatch computes for about {_seconds(seconds)} on each stage; each action takes {_seconds(_OVERHEAD)} "
        f"more."
    )
    rank_zero_info(reason(name, estimates, free, microbatches) + costs + "".join(refused))
    return parts[name].placement


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


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def memory_for_activations(
    module: nn.Module, layout: Layout, device: torch.device, ranks_here: int, *, fully_sharded: bool
) -> int:
    """About the bytes that a stage has for activations. Set aside are its parameters, and a gradient and two moments of
    those that are trained, as if they were even over the stages, and a fifth of what is left.

    Args:
        module: whole, and not on the device yet.
        layout: how many ranks share it.
        device: of this rank. Of a GPU's memory, what is free now counts; else the machine's, or what a container or a
            job may have of it.
        ranks_here: the number of ranks that share the device, or this machine.
        fully_sharded: replicas share a stage's state.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and not in use
        memory = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_limits()])
    state = sum((_COPIES if p.requires_grad else 1) * p.nbytes for p in module.parameters())
    sharers = layout.stages * layout.size("tensor") * (layout.size("data") if fully_sharded else 1)
    return max(0, int(_USABLE * (memory // ranks_here - state // sharers)))


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """The bytes of memory that this process's control groups may have (cgroups(7)): by them containers, Kubernetes and
    SLURM set limits. A group's own limit counts, and those of the groups around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            try:
                text = (mount / folder / name).read_text().strip()
            except OSError:  # a group outside of the container, or without a limit
                continue
            if text.isdigit():
                yield int(text)
