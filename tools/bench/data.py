"""Data parallelism beside torch's own in bare loops: what Lightning and the strategies add, what replicas gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.tables import Cell, Table
from tools.bench import processes, replicated
from tools.bench.contestants import Times, alternate
from tools.bench.layers import adamw
from tools.bench.replicated import Train, Work
from tools.bench.rounds import by_round, middle, ratios

ONE = "one process, one thread"
DDP, DDP_FIT = "DDP, bare loop", "DDP in Trainer.fit"
SHARD, SHARD_FIT = "fully_shard, bare loop", "FullyShardedStrategy in Trainer.fit"
TORCH_PIPELINE, PIPELINE_FIT = "torch's 1F1B and DDP, bare loop", "PipelineStrategy in Trainer.fit"
DP_FIT = "DataParallelStrategy in Trainer.fit"


@dataclass(frozen=True)
class Group:
    """Contestants that do the same updates.

    Attributes:
        title: what they have in common.
        processes: how many ranks there are. What runs in one process runs on rank 0.
        contestants: by name; :data:`ONE` is one of them.
        reference, judged: names of two: the time of a step of ``judged`` over that of ``reference`` is aimed at.
        target: ``("at most" or "above", this ratio)``.
    """

    title: str
    processes: int
    contestants: Mapping[str, Train]
    reference: str
    judged: str
    target: tuple[str, float]


DDP_GROUP = Group(
    "DDP on two processes",
    2,
    {ONE: replicated.one_process, DDP: replicated.ddp_bare, DDP_FIT: replicated.ddp_fit},
    reference=DDP,
    judged=DDP_FIT,
    target=("at most", 1.03),
)
FSDP_GROUP = Group(
    "Fully sharded, on two processes",
    2,
    {ONE: replicated.one_process, SHARD: replicated.fully_shard_bare, SHARD_FIT: replicated.fully_sharded_fit},
    reference=SHARD,
    judged=SHARD_FIT,
    target=("at most", 1.03),
)
PIPELINE_GROUP = Group(
    "Two replicas of two stages, on four processes",
    4,
    {
        ONE: replicated.one_process,
        TORCH_PIPELINE: replicated.pipelining_with_ddp,
        PIPELINE_FIT: replicated.pipeline_fit,
    },
    reference=TORCH_PIPELINE,
    judged=PIPELINE_FIT,
    target=("at most", 1.0),
)
THREADS_GROUP = Group(
    "Two replicas: in one process, and in two",
    2,
    {ONE: replicated.one_process, DDP_FIT: replicated.ddp_fit, DP_FIT: replicated.data_parallel_fit},
    reference=DDP_FIT,
    judged=DP_FIT,
    target=("above", 1.0),
)


@dataclass(frozen=True)
class Sizes:
    """``rounds`` in which each contestant runs ``steps`` that count, and ``skip`` and one before them that don't."""

    work: Work = Work(layers=4, width=256, heads=4, length=128, samples=4)
    rounds: int = 10
    steps: int = 8
    skip: int = 2


# Operations so short that most of a step is Python.
SHORT = Sizes(Work(layers=8, width=64, heads=2, length=32, samples=2))
QUICK = Sizes(Work(layers=2, width=128, heads=2, length=64, samples=4), rounds=4, steps=5)
PIPELINE = Sizes(Work(layers=4, width=256, heads=4, length=64, samples=16, microbatches=8), steps=6)
QUICK_SHORT = Sizes(SHORT.work, rounds=4, steps=5)
QUICK_PIPELINE = Sizes(Work(layers=2, width=128, heads=2, length=32, samples=8, microbatches=8), rounds=4, steps=5)


def measure(group: Group, *sizes: Sizes) -> list[Table]:
    """A table for each of ``sizes``."""
    return [_table(group, each) for each in sizes]


def _table(group: Group, sizes: Sizes) -> Table:
    times = processes.run(_times, group.processes, group.contestants, sizes)[0]
    work = sizes.work
    microbatches = f", {work.microbatches} microbatches" if work.microbatches > 1 else ""
    return Table(
        f"{group.title}: {work.layers} GPT blocks, d {work.width}, T {work.length}, {work.samples} samples a "
        f"replica{microbatches}, a thread each",
        {
            "contestant": "",
            "step (ms)": ".2f",
            "least (ms)": ".2f",
            "speed-up": ".3f",
            "speed-up, middle half": "",
            "ratio": ".3f",
            "ratio, middle half": "",
            "of the least": ".3f",
            "target": "",
            "met": "",
        },
        rows(group, times, sizes.steps),
        f"Time from step to step on rank 0; AdamW, float32. {sizes.rounds} rounds, in turn, of {sizes.steps} steps "
        "that count. Step: median over the rounds of a round's median. Least: of all steps. Speed-up: over "
        f"{ONE}, on the whole batch. Ratio: to the step of {group.reference}. Both: medians over the rounds of the "
        "ratios within one.",
    )


def rows(group: Group, times: Times, steps: int) -> list[list[Cell]]:
    """Of the table, from the seconds of ``steps`` a round."""
    typical = {name: by_round(seconds, steps) for name, seconds in times.items()}
    table: list[list[Cell]] = []
    for name, seconds in times.items():
        gained = ratios(typical[ONE], typical[name])
        slower = ratios(typical[name], typical[group.reference])
        row: list[Cell] = [name, median(typical[name]) * 1e3, min(seconds) * 1e3, median(gained), middle(gained)]
        row += [median(slower), middle(slower), min(seconds) / min(times[group.reference])]
        table.append([*row, *(verdict(group.target, median(slower)) if name == group.judged else (None, None))])
    return table


def verdict(target: tuple[str, float], ratio: float) -> tuple[str, str]:
    """The target in words, and whether ``ratio`` meets it."""
    bound, limit = target
    met = ratio <= limit if bound == "at most" else ratio > limit
    return f"{bound} {limit:.2f}", "yes" if met else "no"


# -- on the ranks ------------------------------------------------------------------------------------------------


def _times(contestants: Mapping[str, Train], sizes: Sizes) -> Times:
    agree(contestants, sizes.work)

    def timed(train: Train) -> list[float]:
        seconds = train(sizes.work, sizes.skip + 1 + sizes.steps, adamw).seconds
        return seconds[sizes.skip :] if dist.get_rank() == 0 else []

    runs: dict[str, Callable[[], list[float]]] = {name: partial(timed, train) for name, train in contestants.items()}
    return alternate(runs, sizes.rounds)


def agree(contestants: Mapping[str, Train], work: Work) -> None:
    """Raises AssertionError unless all have the losses of the first one, step by step, which isn't still."""
    (name, reference), *others = ((name, _losses(train, work)) for name, train in contestants.items())
    changed = (reference.max() - reference.min()).item()
    assert changed > 1e-3 * reference.abs().max().item(), f"{name}: losses that don't change can't be compared"
    for other, losses in others:
        torch.testing.assert_close(losses, reference, rtol=0, atol=1e-3 * changed, msg=f"{other}: {{}}".format)


def _losses(train: Train, work: Work) -> Tensor:
    """Of each of some steps, of the whole batch: the mean over the ranks that saw any, whose shares are as large."""
    mine = [loss.item() for loss in train(work, 4, _plain_descent).losses]
    seen: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(seen, mine)
    return torch.tensor([losses for losses in seen if losses], dtype=torch.float64).mean(0)


def _plain_descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW, it shows a gradient that is the sum where it should be the mean."""
    return torch.optim.SGD(parameters, lr=0.5)
