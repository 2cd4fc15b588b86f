"""One stage beside a plain loop, on one device: what the engine adds to a model that nothing divides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import OneProcess, Ours
from tools.bench.layers import blocks, mixed
from tools.bench.report import device_name
from tools.bench.rounds import in_turn, middle, ratios


@dataclass(frozen=True)
class Sizes:
    """``depth`` transformer blocks of ``width`` on ``batch`` x ``length`` tokens; pairs of a step of each, one after
    the other, in turn; of each kind, the first ``skip`` don't count."""

    device: str = "cpu"
    width: int = 256
    length: int = 128
    batch: int = 16
    depth: int = 4
    microbatches: tuple[int, ...] = (1, 4, 16)
    pairs: int = 12
    skip: int = 2


QUICK = Sizes(width=64, length=16, depth=1, microbatches=(1, 2), pairs=3, skip=1)
# 10 TFLOP a step, so that all rows and the imports of five processes, one of which compiles, take a minute.
CUDA = Sizes("cuda", width=2048, length=1024, batch=4, depth=8, microbatches=(1, 4), pairs=10, skip=5)
QUICK_CUDA = Sizes("cuda", width=256, depth=2, microbatches=(1, 2), pairs=3, skip=1)

PRECISIONS: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "float32": lambda device: nullcontext(),
    "bf16 autocast": mixed,
}


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row, as one of the runs may take too long."""
    where = device_name(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"One stage beside a plain loop, on {where}: {sizes.depth} blocks, d {sizes.width}, "
        f"{sizes.batch} x {sizes.length} tokens",
        {
            "precision": "",
            "microbatches": "d",
            "plain loop (ms)": ".2f",
            "one stage (ms)": ".2f",
            "added": ".1%",
            "middle half of the ratios": "",
        },
        rows,
        f"A step: forwards, backwards and SGD. Medians of {sizes.pairs} pairs.",
    )
    kinds = [(precision, count, False) for precision in PRECISIONS for count in sizes.microbatches]
    if sizes.device == "cuda":
        kinds.append(("bf16 autocast", sizes.microbatches[-1], True))
    for precision, count, compiled in kinds:
        plain, ours = processes.run(_times, 1, sizes, precision, count, compiled)[0]
        added = ratios(ours, plain)
        words = f"{precision}{', compiled' if compiled else ''}"
        each = [1e3 * median(times) for times in (plain, ours)]
        rows.append([words, count, *each, median(added) - 1, middle(added)])
        yield table


def _times(sizes: Sizes, precision: str, microbatches: int, compiled: bool) -> tuple[list[float], list[float]]:
    """Seconds of the plain loop's steps, and of the stage's."""
    device = torch.device(sizes.device)
    # On a GPU as users are advised to train; without TF32 a step would take several times as long.
    torch.set_float32_matmul_precision("high" if sizes.device == "cuda" else "highest")
    batch = torch.randn(sizes.batch, sizes.length, sizes.width, device=device)
    made = [blocks(sizes.depth, sizes.width).to(device) for _ in range(2)]
    for layers in made if compiled else ():
        for layer in layers:
            layer.compile()
    plain, ours = OneProcess(made[0], batch, microbatches), Ours(made[1], "1f1b", batch, microbatches)
    times: list[list[float]] = [[], []]
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for turn in range(sizes.skip + sizes.pairs):
        for which in in_turn((0, 1), turn):
            wait()
            begin = time.perf_counter()
            with PRECISIONS[precision](device.type):
                (plain, ours)[which].step()
            wait()
            times[which].append(time.perf_counter() - begin)
    first, second = (each[sizes.skip :] for each in times)
    return first, second
