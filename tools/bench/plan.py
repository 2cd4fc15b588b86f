"""What ``lightning_parallel.plan`` predicts, beside what is measured: the layouts of models of several families, each
trained for a few steps by as many processes over gloo."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

import lightning_parallel
from lightning_parallel.comparison.timing import Measured, kept_waiting, on_rank, threads_of_rank, timed
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.table import Plan, Row, one_of_each
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.layers import quiet
from tools.bench.plan_models import FAMILIES, MODELS, PRELOAD, Model

MIB = 2**20
NEAR = 1.05  # a layout whose steps take so many times the fastest one's is as good
_LIMIT = 300.0  # seconds, for all layouts of a model
_TRAINER = {"accelerator": "cpu", "precision": "32-true"}
ALL = "all"
FOUR = "four"  # the part of four ranks, which takes the first model of each of these families
_OF_FOUR = ("gpt", "encoder-decoder", "resnet", "mlp", "lstm")


@dataclass(frozen=True)
class Sizes:
    """At most so many models of a family; ``steps`` of each layout that are timed."""

    models: int = 3
    steps: int = 7


QUICK = Sizes(models=1, steps=1)


@dataclass(frozen=True)
class Taken(Measured):
    """What a layout has taken, and how its ranks have had the cores.

    Attributes:
        computing: seconds of a step in which a rank's thread had a core: the median of the busiest rank.
        queued: the share of time in which a rank could have gone on, and had none.
    """

    computing: float
    queued: float


class _Cores(Callback):
    """For some batches, the seconds in which this rank's thread had a core, and the share in which others had it."""

    def __init__(self, batches: Collection[int]) -> None:
        self._batches = batches
        self._last = 0.0, 0.0, 0.0
        self._seconds, self._computing, self._queued = list[float](), list[float](), list[float]()

    def on_train_batch_end(self, *args: Any) -> None:
        now = time.perf_counter(), time.thread_time(), kept_waiting()
        if args[-1] in self._batches:
            for each, end, begin in zip((self._seconds, self._computing, self._queued), now, self._last, strict=True):
                each.append(end - begin)
        self._last = now

    def taken(self, measured: Measured) -> Taken:
        queued = min(1.0, sum(self._queued) / sum(self._seconds))
        return Taken(measured.seconds, measured.held, median(self._computing), queued)


@dataclass(frozen=True)
class Pair:
    """A layout's row in a plan, and what it has taken; or its error."""

    model: Model
    ranks: int
    row: Row
    measured: Taken | None
    how: str = "ended"

    @property
    def time(self) -> float:
        """Measured over predicted."""
        assert self.measured is not None
        return self.measured.seconds / self.row.time.total

    @property
    def memory(self) -> float:
        """Measured over predicted."""
        assert self.measured is not None
        return self.measured.held / self.row.memory.total


@dataclass(frozen=True)
class Judged:
    """A plan beside the layouts that it is of.

    Attributes:
        seconds: in which it was made.
    """

    model: Model
    ranks: int
    seconds: float
    pairs: Sequence[Pair]

    @property
    def synchronous(self) -> list[Pair]:
        """Those that ended, and could be chosen: the best by plan first."""
        return [pair for pair in self.pairs if pair.measured is not None and not pair.row.choice.is_late]

    @property
    def fastest(self) -> Pair:
        return min(self.synchronous, key=_seconds)

    @property
    def regret(self) -> float:
        """The time of the chosen layout in units of the fastest one's."""
        return _seconds(self.synchronous[0]) / _seconds(self.fastest)


def _seconds(pair: Pair) -> float:
    assert pair.measured is not None
    return pair.measured.seconds


@dataclass
class Bench:
    """Measures families one after the other; tables are of all so far."""

    judged: list[Judged] = field(default_factory=list)

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """For each family on two ranks, and for some on four: in full and with ``--quick``."""
        names = (*FAMILIES, FOUR)
        return {name: (partial(self.measure, name, Sizes()), partial(self.measure, name, QUICK)) for name in names}

    def measure(self, name: str, sizes: Sizes) -> Iterator[Table]:
        quiet()
        by_family = {f: [model for model in MODELS.values() if model.family == f] for f in FAMILIES}
        if name == FOUR:
            ranks, models = 4, [by_family[family][0] for family in _OF_FOUR]
        else:
            ranks, models = 2, by_family[name][: sizes.models]
        for model in models:
            self.judged.append(judged(model, ranks, sizes.steps))
            yield from tables(self.judged)


def judged(model: Model, ranks: int, steps: int) -> Judged:
    """Plan a model's layouts, and train the best number of microbatches of each."""
    module, batch = model.build()
    threads = torch.get_num_threads()
    start = time.perf_counter()
    found: Plan = lightning_parallel.plan(module, batch, devices=ranks)
    seconds = time.perf_counter() - start
    torch.set_num_threads(threads)
    rows = one_of_each(found.rows)
    ends = _ends(model, ranks, [row.choice for row in rows], steps)
    pairs = [Pair(model, ranks, row, *end) for row, end in zip(rows, ends, strict=True)]
    return Judged(model, ranks, seconds, pairs)


def _ends(model: Model, ranks: int, choices: Sequence[Choice], steps: int) -> list[tuple[Taken | None, str]]:
    """What each layout has taken, and how it ended. One that fails or hangs takes the others of its processes with it:
    then each is trained in processes of its own."""
    how, found = processes.attempt(_trained, ranks, model, choices, steps, limit=_LIMIT, preload=PRELOAD)
    if found is not None:
        return [_end(of_ranks) for of_ranks in zip(*found, strict=True)]
    if len(choices) == 1:
        return [(None, how)]
    return [end for choice in choices for end in _ends(model, ranks, [choice], steps)]


def _end(of_ranks: Sequence[Taken | str]) -> tuple[Taken | None, str]:
    figures = [each for each in of_ranks if isinstance(each, Taken)]
    errors = [each for each in of_ranks if isinstance(each, str)]
    return (None, errors[0]) if errors else (Taken.of_ranks(figures), "ended")


def _trained(model: Model, choices: Iterable[Choice], steps: int) -> list[Taken | str]:
    """What each layout has taken on this rank, or its error, which all ranks have."""
    quiet()
    ranks = torch.distributed.get_world_size()
    torch.set_num_threads(threads_of_rank(ranks))
    found: list[Taken | str] = []
    for choice in choices:
        module, batch = model.build()
        cores = _Cores(timed(steps))
        given = choice.strategy, choice.options, module, batch, ranks, _TRAINER
        try:
            found.append(cores.taken(on_rank(*given, cores, steps=steps)))
        except ValueError as error:  # a refusal
            found.append(f"failed: {str(error)[:200]}")
    return found


# -- tables ------------------------------------------------------------------------------------------------------


def tables(found: Sequence[Judged]) -> list[Table]:
    return [_families(found), _choices(found), _rows(found)]


def _families(found: Sequence[Judged]) -> Table:
    names = [name for name in FAMILIES if any(each.model.family == name for each in found)]
    rows: list[list[Cell]] = []
    for name in [*names, *([ALL] if len(names) > 1 else [])]:
        own = [each for each in found if name in (ALL, each.model.family)]
        pairs = [pair for each in own for pair in each.pairs if pair.measured is not None]
        if not pairs:
            continue
        times, memories = [pair.time for pair in pairs], [pair.memory for pair in pairs]
        near = sum(each.regret <= NEAR for each in own)
        rows.append(
            [
                name,
                len({each.model.name for each in own}),
                len(pairs),
                median(times),
                _error(times, median),
                _error(times, max),
                _error(memories, median),
                _error(memories, max),
                f"{near} of {len(own)}",
                max(each.regret for each in own),
                max(each.seconds for each in own),
            ]
        )
    return Table(
        "What a plan says, and what was measured",
        {
            "family": "",
            "models": "d",
            "layouts": "d",
            "measured / predicted time": ".2f",
            "off, median": ".0%",
            "off, worst": ".0%",
            "memory off, median": ".0%",
            "memory off, worst": ".0%",
            "chosen within 5 %": "",
            "worst choice": ".2f",
            "plan (s)": ".0f",
        },
        rows,
        "Off: how far the measured step or the bytes on the fullest rank are from the predicted, in parts of the "
        "prediction. Chosen: is the layout that a plan takes within 5 % of the fastest one's time? Worst choice: the "
        "chosen one's time in units of the fastest one's. Plan: the longest that one took.",
    )


def _error(ratios: Sequence[float], of: Any) -> float:
    return float(of([abs(ratio - 1) for ratio in ratios]))


def _choices(found: Sequence[Judged]) -> Table:
    rows: list[list[Cell]] = []
    for each in found:
        if not each.synchronous:
            continue
        chosen, fastest = each.synchronous[0], each.fastest
        queued = max(pair.measured.queued for pair in each.pairs if pair.measured is not None)
        row: list[Cell] = [each.model.name, each.ranks, _named(chosen), _named(fastest), each.regret, each.seconds]
        rows.append([*row, queued])
    return Table(
        "The layout that a plan takes, and the fastest",
        {
            "model": "",
            "ranks": "d",
            "by plan": "",
            "measured": "",
            "time of the first / second": ".2f",
            "plan (s)": ".1f",
            "no core": ".0%",
        },
        rows,
        "Layouts with the numbers of one process. No core: the largest share of a rank's time in which others had the "
        "cores; with more ranks than cores they are other ranks.",
    )


def _named(pair: Pair) -> str:
    choice = pair.row.choice
    return f"{choice}, {choice.microbatches} microbatches" if choice.is_pipeline else str(choice)


def _rows(found: Sequence[Judged]) -> Table:
    rows: list[list[Cell]] = []
    for pair in [pair for each in found for pair in each.pairs]:
        row: list[Cell] = [pair.model.name, pair.ranks, _named(pair), pair.row.time.total * 1e3]
        if pair.measured is None:
            rows.append([*row, None, None, None, pair.row.memory.total / MIB, None, None, None, pair.how])
            continue
        measured = pair.measured
        row += [measured.seconds * 1e3, measured.computing * 1e3, pair.time]
        row += [pair.row.memory.total / MIB, measured.held / MIB, pair.memory, measured.queued, pair.how]
        rows.append(row)
    return Table(
        "Each layout",
        {
            "model": "",
            "ranks": "d",
            "layout": "",
            "predicted (ms)": ".0f",
            "measured (ms)": ".0f",
            "on a core (ms)": ".0f",
            "ratio": ".2f",
            "predicted (MiB)": ".1f",
            "measured (MiB)": ".1f",
            "memory ratio": ".2f",
            "no core": ".0%",
            "how it ended": "",
        },
        rows,
        "The step: the median, on the slowest rank; the part of it in which the busiest rank had a core. MiB: tensors "
        "on the fullest rank, at the most in a step. No core: the share of time in which a rank could have gone on.",
    )
