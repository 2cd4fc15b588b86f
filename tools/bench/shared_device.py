"""Stages that share a device, beside one process that has it for itself: what dividing costs where it gains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Contestant, OneProcess, Ours, Synchronous, Times, alternate, timed_steps
from tools.bench.layers import blocks
from tools.bench.report import device_name
from tools.bench.rounds import middle, ratios

STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """``depth`` transformer blocks of ``width`` on ``batch`` x ``length`` tokens, over ``stages`` processes. In each of
    ``rounds`` rounds every contestant takes ``STEPS`` steps, in turn; the first round isn't counted."""

    device: str = "cpu"
    stages: int = 2
    width: int = 256
    length: int = 128
    batch: int = 16
    depth: int = 4
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    microbatches: int = 8
    rounds: int = 6


QUICK = Sizes(width=64, length=8, batch=4, depth=2, microbatches=2, rounds=3)
CUDA = Sizes("cuda", width=2048, length=1024, depth=8)
QUICK_CUDA = Sizes("cuda", depth=2, microbatches=2, rounds=3)


def measure(sizes: Sizes) -> list[Table]:
    times = processes.run(_times, sizes.stages, sizes)[0]
    plain = times.pop("one process")
    rows: list[list[Cell]] = [["one process", 1e3 * median(plain), 0.0, ""]]
    for name, found in times.items():
        added = ratios(found, plain)
        rows.append([f"{name}, {sizes.stages} stages", 1e3 * median(found), median(added) - 1, middle(added)])
    where = device_name(sizes.device)
    return [
        Table(
            f"Stages that share one device, {where}: {sizes.depth} blocks, d {sizes.width}, {sizes.batch} x "
            f"{sizes.length} tokens, {sizes.microbatches} microbatches",
            {"contestant": "", "step (ms)": ".2f", "added": ".1%", "middle half of the ratios": ""},
            rows,
            "A step: forwards, backwards and SGD. Messages go over gloo, from a GPU through host memory.",
        )
    ]


def _times(sizes: Sizes) -> Times:
    """Seconds of steps, by contestant; on rank 0."""
    device = torch.device(sizes.device)
    torch.manual_seed(0)
    batch = torch.randn(sizes.batch, sizes.length, sizes.width, device=device)

    def layers() -> torch.nn.Sequential:
        return blocks(sizes.depth, sizes.width).to(device)

    made: dict[str, Contestant] = {"one process": OneProcess(layers(), batch, sizes.microbatches)}
    for name in sizes.schedules:
        made[name] = Ours(layers(), name, batch, sizes.microbatches)
    runs = {name: partial(timed_steps, _UntilDone(contestant, device), STEPS) for name, contestant in made.items()}
    times = alternate(runs, sizes.rounds)
    return {name: found[STEPS:] for name, found in times.items()}


class _UntilDone(Synchronous):
    """A contestant whose step ends when the device has done it."""

    def __init__(self, contestant: Contestant, device: torch.device) -> None:
        self._contestant, self._device = contestant, device
        self.is_first, self.is_last = contestant.is_first, contestant.is_last

    def step(self) -> None:
        self._contestant.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
