"""How long a host takes to launch a step, beside how long its device takes to run it: what Python costs, if anything.

A host that is faster than its device runs ahead, and its time is hidden. One that is slower is what a step takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Contestant, OneProcess, Ours, timed_launch
from tools.bench.layers import blocks, mixed
from tools.bench.report import HOW, device_name

PLAIN = "plain loop"


@dataclass(frozen=True)
class Sizes:
    """``depth`` transformer blocks of ``width``, in one process; a microbatch has ``length`` tokens. ``steps``
    steps count, after ``skip`` others. The schedules run on a single stage, ``zbv`` on its two chunks, with backwards
    in halves. A row that takes longer than ``limit`` seconds is ended as hung."""

    device: str
    width: int = 2048
    length: int = 1024
    depth: int = 8
    schedules: tuple[str, ...] = ("1f1b", "zbv")
    microbatches: tuple[int, ...] = (4,)
    steps: int = 10
    skip: int = 2
    limit: float = 30.0


CUDA = Sizes("cuda")
QUICK_CUDA = Sizes("cuda", width=256, length=128, depth=2, microbatches=(2,), steps=2, skip=1)
QUICK = Sizes("cpu", width=64, length=16, depth=2, microbatches=(2,), steps=2, skip=1, limit=120.0)


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row."""
    where = device_name(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"Host and device of one stage, {where}: {sizes.depth} blocks, d {sizes.width}, {sizes.length} tokens a "
        f"microbatch, bf16 autocast",
        {
            "contestant": "",
            "microbatches": "d",
            HOW: "",
            "host (ms)": ".2f",
            "step (ms)": ".2f",
            "host / step": ".0%",
        },
        rows,
        f"Host: until it has launched a step, the device being idle before. Step: until the device has done it. "
        f"Medians of {sizes.steps}.",
    )
    for microbatches in sizes.microbatches:
        for name in (PLAIN, *sizes.schedules):
            how, ranks = processes.attempt(_times, 1, sizes, name, microbatches, limit=sizes.limit)
            row: list[Cell] = [name, microbatches, how, None, None, None]
            if ranks is not None:
                host, step = (median(each) for each in zip(*ranks[0], strict=True))
                row[3:] = [1e3 * host, 1e3 * step, host / step]
            rows.append(row)
            yield table


def _times(sizes: Sizes, name: str, microbatches: int) -> list[tuple[float, float]]:
    """Of each step that counts."""
    device = torch.device(sizes.device)
    torch.manual_seed(0)
    batch = torch.randn(microbatches, sizes.length, sizes.width, device=device)
    layers = blocks(sizes.depth, sizes.width).to(device)
    contestant: Contestant = (
        OneProcess(layers, batch, microbatches) if name == PLAIN else Ours(layers, name, batch, microbatches)
    )

    def step() -> None:
        with mixed(sizes.device):
            contestant.step()

    return [timed_launch(step, device) for _ in range(sizes.skip + sizes.steps)][sizes.skip :]
