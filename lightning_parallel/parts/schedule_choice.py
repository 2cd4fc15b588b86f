"""``schedule="auto"`` in a run: what schedules would cost with the model, and the memory that there is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_parallel.layout import Layout, Placement
from lightning_parallel.parts.cutting import Partitions
from lightning_parallel.pipeline.actions import Schedule
from lightning_parallel.pipeline.choosing import choose, estimate, reason
from lightning_parallel.pipeline.partition import Partition

_OVERHEAD = 1e-3  # seconds that an action takes besides what it computes, and a message: see docs/figures.md
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
    each = 3 * sum(parts[name].work) / parts[name].stages / speed
    costs = f" An action takes {_seconds(_OVERHEAD)} besides, and a microbatch about {_seconds(each)} on each stage."
    rank_zero_info(reason(name, estimates, free, microbatches) + costs + "".join(refused))
    return parts[name].placement


def operations_a_second(device: torch.device) -> float:
    """About the floating-point operations that a device does in a second, by products of matrices, in the dtype that
    autocast or the default says. A model's own layers do fewer."""
    size, products = 1024, 4
    a, b = torch.ones(2, size, size, device=device)
    float((a @ b)[0, 0])  # to warm up; and wait for it
    begin = time.perf_counter()
    for _ in range(products):
        c = a @ b
    float(c[0, 0])
    return products * 2 * size**3 / (time.perf_counter() - begin)


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
        device: of this rank. Of a GPU's memory, what is free now counts; else the machine's.
        ranks_here: the number of ranks that share the device, or this machine.
        fully_sharded: replicas share a stage's state.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and not in use
        memory = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    state = sum((_COPIES if p.requires_grad else 1) * p.nbytes for p in module.parameters())
    sharers = layout.stages * layout.size("tensor") * (layout.size("data") if fully_sharded else 1)
    return max(0, int(_USABLE * (memory // ranks_here - state // sharers)))
