"""Tensor parallelism beside DTensor: how long a step takes, and what dividing costs where nothing is divided."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import ColumnParallelLinear, RowParallelLinear
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Times, alternate
from tools.bench.report import device_name
from tools.bench.rounds import by_round, middle, ratios
from tools.bench.sharded import Contestant, blocks, by_hand, mlp, ours, theirs, whole

ONE, BY_HAND = "one process, one thread", "by hand"
OURS, OURS_REGION, OURS_SEQUENCE = "ours", "ours, dropout allowed for", "ours, sequence-parallel"
TORCH, TORCH_SEQUENCE = "DTensor", "DTensor, sequence-parallel"
COLUMN, ROW, PLAIN = "ColumnParallelLinear", "RowParallelLinear", "nn.Linear"

_HOW = (
    "Step: median over the rounds of a round's median. Least: of all steps. DTensor / this and this / by hand: medians "
    "over the rounds of the ratios within one, then ratios of the least."
)


@dataclass(frozen=True)
class MLPSizes:
    """Widths with rows of input; ``rounds`` in which each contestant runs ``steps``, by size."""

    sizes: tuple[tuple[int, int], ...] = ((64, 16), (256, 64), (512, 512))
    rounds: int = 20
    steps: tuple[int, ...] = (40, 20, 4)


QUICK_MLP = MLPSizes(rounds=4, steps=(20, 10, 3))


def measure_mlp(sizes: MLPSizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for (width, inputs), steps in zip(sizes.sizes, sizes.steps, strict=True):
        times = processes.run(_mlp_times, 2, width, inputs, sizes.rounds, steps)[0]
        rows += _rows(f"d {width}, {inputs} rows", times, steps)
    return [
        Table(
            "Eight linear layers with ReLU, two ranks",
            _COLUMNS,
            rows,
            f"Forward and backward; {sizes.rounds} rounds, in turn, of {_numbers(sizes.steps)} steps. {_HOW} By hand: "
            "functions around F.linear.",
        )
    ]


@dataclass(frozen=True)
class BlockSizes:
    """Widths with heads and a batch's samples and length; see :class:`MLPSizes`."""

    sizes: tuple[tuple[int, int, int, int], ...] = ((64, 4, 2, 32), (256, 4, 4, 64))
    layers: int = 2
    rounds: int = 20
    steps: tuple[int, ...] = (20, 4)


QUICK_BLOCK = BlockSizes(layers=1, rounds=4, steps=(20, 10))


def measure_block(sizes: BlockSizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for (width, heads, samples, length), steps in zip(sizes.sizes, sizes.steps, strict=True):
        model = (sizes.layers, width, heads)
        times = processes.run(_block_times, 2, model, (samples, length, width), sizes.rounds, steps)[0]
        rows += _rows(f"d {width}, {heads} heads, {samples} x {length}", times, steps)
    return [
        Table(
            f"GPT blocks, {sizes.layers} of them, two ranks",
            _COLUMNS,
            rows,
            f"Forward and backward; {sizes.rounds} rounds, in turn, of {_numbers(sizes.steps)} steps. {_HOW} "
            "Dropout allowed for: with the generator reseeded inside attention and MLP, as the strategies do.",
        )
    ]


@dataclass(frozen=True)
class AloneSizes:
    """Widths with rows of input; ``rounds`` in which each layer runs ``steps``, on ``device``."""

    sizes: tuple[tuple[int, int], ...] = ((64, 16), (256, 64), (512, 512))
    rounds: int = 30
    steps: tuple[int, ...] = (300, 200, 20)
    device: str = "cpu"


CUDA_ALONE = AloneSizes(((64, 16), (512, 512), (4096, 4096)), steps=(300, 300, 30), device="cuda")
QUICK_ALONE = AloneSizes(rounds=4, steps=(50, 50, 5))
QUICK_CUDA_ALONE = AloneSizes(CUDA_ALONE.sizes, rounds=4, steps=(50, 50, 5), device="cuda")


def measure_alone(sizes: AloneSizes) -> Iterator[Table]:
    """The table again with each size."""
    where = device_name(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"Layers of a tensor group of one, on {where}",
        {
            "size": "",
            "layer": "",
            "step (us)": ".1f",
            "least (us)": ".1f",
            "added": ".1%",
            "middle half": "",
            "to the least": ".1%",
        },
        rows,
        f"Forward and backward of one layer; {sizes.rounds} rounds, in turn, of {_numbers(sizes.steps)} steps. "
        "Step: median over the rounds of a round's median. Added: median over the rounds of the ratio to nn.Linear "
        "within one; to the least of all steps.",
    )
    for (width, inputs), steps in zip(sizes.sizes, sizes.steps, strict=True):
        times = processes.run(_alone_times, 1, width, inputs, sizes.rounds, steps, sizes.device)[0]
        typical = {name: by_round(seconds, steps) for name, seconds in times.items()}
        for name, seconds in times.items():
            added, least = ratios(typical[name], typical[PLAIN]), min(seconds)
            row: list[Cell] = [f"d {width}, {inputs} rows", name, median(typical[name]) * 1e6, least * 1e6]
            rows.append([*row, median(added) - 1, middle(added), least / min(times[PLAIN]) - 1])
        yield table


# -- on the ranks ------------------------------------------------------------------------------------------------


def _mlp_times(width: int, rows: int, rounds: int, steps: int) -> Times:
    model, x = mlp(width), _input(rows, width)
    contestants = {
        ONE: whole(model, x),
        BY_HAND: by_hand(model, x),
        OURS: ours(model, x),
        TORCH: theirs(model, x),
    }
    return _compare(contestants, rounds, steps)


def _block_times(model: tuple[int, int, int], shape: tuple[int, int, int], rounds: int, steps: int) -> Times:
    module, x = blocks(*model), _input(*shape)
    contestants = {
        ONE: whole(module, x),
        BY_HAND: by_hand(module, x),
        OURS: ours(module, x),
        OURS_REGION: ours(module, x, region=True),
        TORCH: theirs(module, x),
        OURS_SEQUENCE: ours(module, x, sequence_parallel=True),
        TORCH_SEQUENCE: theirs(module, x, sequence_parallel=True),
    }
    return _compare(contestants, rounds, steps)


def _compare(contestants: dict[str, Contestant], rounds: int, steps: int) -> Times:
    agree(contestants)
    runs: dict[str, Callable[[], list[float]]] = {
        name: partial(_timed, contestant, steps, lambda: None)
        for name, contestant in contestants.items()
        if name != ONE or dist.get_rank() == 0
    }
    runs.setdefault(ONE, list)  # the other ranks wait meanwhile
    return alternate({name: runs[name] for name in contestants}, rounds)


def _alone_times(width: int, rows: int, rounds: int, steps: int, device: str) -> Times:
    torch.manual_seed(0)
    plain, x = nn.Linear(width, width, device=device), _input(rows, width).to(device)
    group = dist.group.WORLD
    assert group is not None
    layers = {
        PLAIN: plain,
        COLUMN: ColumnParallelLinear(plain, group),
        ROW: RowParallelLinear(plain, group),
    }
    contestants = {name: Contestant.of(layer, x) for name, layer in layers.items()}
    agree(contestants)
    done = torch.cuda.synchronize if device == "cuda" else lambda: None
    return alternate({name: partial(_timed, each, steps, done) for name, each in contestants.items()}, rounds)


def agree(contestants: dict[str, Contestant]) -> None:
    """Raises AssertionError unless all compute the loss and the input's gradient of the first one, which isn't 0."""
    reference, *others = (_results(contestant) for contestant in contestants.values())
    for other in others:
        for result, expected in zip(other, reference, strict=True):
            largest = expected.abs().max().item()
            assert largest > 0, "a model that doesn't depend on its input can't be compared"
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4 * largest)


def _results(contestant: Contestant) -> tuple[Tensor, Tensor]:
    loss = contestant.step().detach()
    assert contestant.x.grad is not None
    return loss, contestant.x.grad


def _timed(contestant: Contestant, steps: int, done: Callable[[], None]) -> list[float]:
    """Seconds of each step, after one that doesn't count. Steps follow each other: their messages keep the ranks
    together."""
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        contestant.step()
        done()
        times.append(time.perf_counter() - start)
    return times[1:]


def _input(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# -- the tables --------------------------------------------------------------------------------------------------

_COLUMNS = {
    "size": "",
    "contestant": "",
    "step (ms)": ".3f",
    "least (ms)": ".3f",
    "DTensor / this": ".3f",
    "middle half": "",
    "of least": ".3f",
    "this / by hand": ".3f",
    "of the least": ".3f",
}


def _rows(size: str, times: Times, steps: int) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    typical = {name: by_round(seconds, steps) for name, seconds in times.items()}
    for name, seconds in times.items():
        theirs = TORCH_SEQUENCE if name == OURS_SEQUENCE else TORCH
        against = ratios(typical[theirs], typical[name])
        row: list[Cell] = [size, name, median(typical[name]) * 1e3, min(seconds) * 1e3]
        row += [median(against), middle(against, 2), min(times[theirs]) / min(seconds)]
        rows.append([*row, median(ratios(typical[name], typical[BY_HAND])), min(seconds) / min(times[BY_HAND])])
    return rows


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
