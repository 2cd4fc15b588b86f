"""A backward in two halves beside a whole one: what the split costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_parallel.backward.split import begin_backward
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.layers import LlamaBlock, blocks
from tools.bench.rounds import in_turn, middle, ratios


@dataclass(frozen=True)
class Sizes:
    """Blocks of ``width`` on ``batch`` x ``length`` tokens, one thread; ``pairs`` of a backward in halves and a whole
    one, of ``depth`` blocks each."""

    width: int = 512
    length: int = 128
    batch: int = 4
    depth: int = 2
    pairs: int = 30


QUICK = Sizes(width=128, length=32, depth=1, pairs=4)


def measure(sizes: Sizes) -> list[Table]:
    (times,) = processes.run(_times, 1, sizes)
    rows: list[list[Cell]] = []
    for name, (whole, first, second) in times.items():
        both = [one + other for one, other in zip(first, second, strict=True)]
        found = ratios(both, whole)
        each = [1e3 * median(part) for part in (whole, first, second)]
        rows.append([name, *each, median(found), middle(found)])
    return [
        Table(
            f"A backward in two halves: {sizes.depth} blocks, d {sizes.width}, {sizes.batch} x {sizes.length} tokens",
            {
                "block": "",
                "whole (ms)": ".1f",
                "first half": ".1f",
                "second half": ".1f",
                "halves / whole": ".3f",
                "range of its middle half": "",
            },
            rows,
            f"One thread, float32. Medians of {sizes.pairs} pairs; the two of a pair run one after the other, "
            f"and take turns at being first.",
        )
    ]


Measured = tuple[list[float], list[float], list[float]]  # seconds: whole backwards, first halves, second halves


def _times(sizes: Sizes) -> Mapping[str, Measured]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = sizes.width // 64
    llama = nn.Sequential(*(LlamaBlock(sizes.width, heads) for _ in range(sizes.depth)))
    return {"Llama": _timed(llama, sizes), "encoder": _timed(blocks(sizes.depth, sizes.width), sizes)}


def _timed(model: nn.Module, sizes: Sizes) -> Measured:
    given = torch.randn(sizes.batch, sizes.length, sizes.width, requires_grad=True)
    gradient = torch.randn(sizes.batch, sizes.length, sizes.width)
    whole: list[float] = []
    first: list[float] = []
    second: list[float] = []

    def in_one() -> None:
        output: Tensor = model(given)
        begin = time.perf_counter()
        torch.autograd.backward([get_gradient_edge(output)], [gradient])
        whole.append(time.perf_counter() - begin)

    def in_halves() -> None:
        edges = [get_gradient_edge(model(given))]
        begin = time.perf_counter()
        rest = begin_backward(edges, [gradient], [given])
        between = time.perf_counter()
        rest.run()
        first.append(between - begin)
        second.append(time.perf_counter() - between)

    for run in (in_one, in_halves):  # gradients and memory exist from then on
        run()
    for times in (whole, first, second):
        times.clear()
    for turn in range(sizes.pairs):
        for run in in_turn((in_one, in_halves), turn):
            run()
    return whole, first, second
