"""Two stages over NCCL, with small and with large messages: whether a run ends, and what its steps take.

A send over NCCL ends when its receive has been launched, once the message is larger than what NCCL buffers. So an error
in the order of messages is a run that hangs, and only with large ones. Each row has processes and a limit of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lightning_parallel.schedules.generators import one_at_a_time
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Ours, place, timed_launch
from tools.bench.layers import blocks
from tools.bench.over_nccl import RANKS, device_of_rank, way
from tools.bench.report import HOW


@dataclass(frozen=True)
class Sizes:
    """``depth`` transformer blocks of ``width``, over two ranks. A message has ``mebibytes`` MiB of float32, in texts
    of at most ``length`` tokens. ``steps`` steps count after the first one. A row that takes longer than ``limit``
    seconds is ended as hung."""

    device: str
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "zbv")
    mebibytes: tuple[int, ...] = (1, 8, 80)
    width: int = 2048
    length: int = 1024
    depth: int = 4
    microbatches: int = 4
    steps: int = 5
    limit: float = 30.0


CUDA = Sizes("cuda")
QUICK_CUDA = Sizes("cuda", mebibytes=(1,), width=256, length=128, steps=2)
QUICK = Sizes("cpu", mebibytes=(1,), width=64, length=32, microbatches=2, steps=2, limit=120.0)


class _ColdFirst(Ours):
    """A contestant whose first batch goes as strategies have it on a GPU, where every host loads kernels."""

    def first_step(self) -> None:
        self.engine.run(one_at_a_time(self._actions), self._work, update=self._update)


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row."""
    found = way(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"Two stages, {found.words}: {sizes.depth} blocks, d {sizes.width}, {sizes.microbatches} microbatches",
        {
            "schedule": "",
            "message (MiB)": "d",
            HOW: "",
            "first step (ms)": ".1f",
            "step (ms)": ".1f",
            "host (ms)": ".1f",
        },
        rows,
        f"A step: forwards, backwards and SGD; the slower rank's, median of {sizes.steps}. Host: until the host has "
        f"launched all of it. Each row has processes of its own, and {sizes.limit:g} s.",
    )
    for mebibytes in sizes.mebibytes:
        for schedule in sizes.schedules:
            if found.missing is not None:
                rows.append([schedule, mebibytes, f"not run: {found.missing}", None, None, None])
                yield table
                continue
            how, ranks = processes.attempt(
                _steps,
                RANKS,
                sizes,
                schedule,
                mebibytes,
                backend=found.backend,
                limit=sizes.limit,
                environment=found.environment,
            )
            times: list[Cell] = [None, None, None]
            if ranks is not None:
                slower = [tuple(map(max, zip(*steps, strict=True))) for steps in zip(*ranks, strict=True)]
                (_, first), *others = slower
                launched, done = (median(each) for each in zip(*others, strict=True))
                times = [1e3 * first, 1e3 * done, 1e3 * launched]
            rows.append([schedule, mebibytes, how, *times])
            yield table


def _steps(sizes: Sizes, schedule: str, mebibytes: int) -> list[tuple[float, float]]:
    """The times of this rank's steps, the first one among them."""
    torch.set_float32_matmul_precision("high" if sizes.device == "cuda" else "highest")
    device = device_of_rank(sizes.device)
    tokens = mebibytes * 2**20 // (4 * sizes.width)
    length = min(tokens, sizes.length)
    torch.manual_seed(0)
    batch = torch.randn(sizes.microbatches * tokens // length, length, sizes.width, device=device)
    contestant = _ColdFirst(blocks(sizes.depth, sizes.width).to(device), schedule, batch, sizes.microbatches)
    hosts = place(device)[1].host_group
    found = []
    for number in range(1 + sizes.steps):
        dist.barrier(group=hosts)
        found.append(timed_launch(contestant.step if number else contestant.first_step, device))
    return found
