"""Trains a case on one rank, inside a worker of the pool, and compares what the ranks report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.optimizer_table.cases import (
    BY_ALL,
    BY_PARAMETER,
    CLIP,
    ELEMENTWISE,
    EPOCHS,
    LAYOUTS,
    PACKAGED,
    PACKAGED_BY_ALL,
    STAGES,
    TRAINED,
    Net,
    by,
    fit,
    replicas_of,
)
from tests.strategies.harness import STRATEGIES
from tests.strategies.reference import delayed
from tests.zoo.entry import Entry
from tests.zoo.layouts import PLAIN, Layout
from tests.zoo.outcome import Outcome, Verdict, largest, of_errors
from tests.zoo.runner import Runner
from tests.zoo.training import Report, Witness, reported
from tools.workers.pool import WorkerPool

EXACT = 1e-10  # float64, after twelve updates
PATIENCE = 240.0  # seconds for a case
LATE = "late gradients in one process"
ENTRIES = {
    kind: Entry(kind, source, by(kind), Net.samples)
    for source, kinds in (
        ("Elementwise", ELEMENTWISE),
        ("Treat a parameter as a whole", BY_PARAMETER),
        ("Take numbers over all parameters", BY_ALL),
        ("As a package has them", [*PACKAGED, *PACKAGED_BY_ALL]),
    )
    for kind in kinds
}


def _layout(name: str) -> Layout:
    ranks, strategy, options = LAYOUTS[name]
    shares = replicas_of(name) > 1
    return Layout(name, STRATEGIES[strategy], options, ranks, 1, shares, LATE if strategy == "async" else None)


FOUND = {name: _layout(name) for name in LAYOUTS}
REFERENCES = {name: Layout(name, SingleDeviceStrategy) for name in (PLAIN, LATE)}


def make_runner(pool: WorkerPool) -> Runner:
    return Runner(pool, PATIENCE, train, judge, (FOUND | REFERENCES).__getitem__)


def expected(kind: str, layout: str) -> Outcome:
    return Outcome.REFUSED if kind in (*BY_ALL, *PACKAGED_BY_ALL) and (kind, layout) not in TRAINED else Outcome.EQUAL


class Updates(Witness):
    """Counts updates. It reads no loss between them: an asynchronous stage would wait for it."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def train(room: str, kind: str, layout: str, layers: tuple[str, ...] = ()) -> Report:
    """Train a case on this rank. Errors are reported, not raised."""

    def run(report: Report) -> None:
        if layout == LATE:
            own = delayed(by(kind), **STAGES, clip=CLIP, epochs=EPOCHS)
        else:
            _, strategy, options = LAYOUTS.get(layout, (1, "single", {}))
            own = fit(kind, strategy, options, replicas_of(layout), callbacks=[Updates(report)])
        report.losses, report.weights, report.shards = own.losses, own.weights, own.shards
        if layout in REFERENCES and torch.equal(own.weights["head.weight"], Net().double().head.weight):
            raise AssertionError(f"{kind} doesn't train")

    return reported(run)


def judge(
    entry: Entry, layout: Layout, reports: list[Report], plain: Report, fallback: Callable[[], list[Report]]
) -> Verdict:
    """The outcome of a case; arguments as `tests.zoo.outcome.judge`. Late stages are beside the same late gradients in
    one process."""
    failed = of_errors(reports)
    if failed is not None:
        return failed
    others = fallback() if layout.fallback else [plain]
    if others[0].error is not None:
        return Verdict(Outcome.CRASHED, f"{layout.fallback}: {others[0].error.message}", trace=others[0].error.trace)
    deviation, where = largest(reports, others, layout.shares)
    if deviation <= EXACT:
        return Verdict(Outcome.EQUAL, deviation=deviation)
    return Verdict(Outcome.DIFFERENT, f"largest in {where}", deviation)
