"""Trains a case on one rank, inside a worker of the pool, and compares what the ranks report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from tools.optimizer_table.cases import (
    BY_ALL,
    BY_PARAMETER,
    CLIP,
    ELEMENTWISE,
    EPOCHS,
    LAYOUTS,
    PACKAGED,
    PACKAGED_BY_ALL,
    STAGES,
    STRATEGIES,
    TRAINED,
    Net,
    by,
    fit,
    replicas_of,
)
from tools.study.reference import delayed
from tools.workers.pool import WorkerPool
from tools.zoo.entry import Entry
from tools.zoo.layouts import PLAIN, Layout
from tools.zoo.outcome import Outcome, Verdict, largest, of_errors
from tools.zoo.runner import Runner
from tools.zoo.training import Report, reported

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


def train(room: str, kind: str, layout: str, layers: tuple[str, ...] = ()) -> Report:
    """Train a case on this rank. Errors are reported, not raised."""

    def run(report: Report) -> None:
        if layout == LATE:
            own = delayed(by(kind), **STAGES, clip=CLIP, epochs=EPOCHS)
            report.losses, report.weights = own.losses, own.weights
        else:
            _, strategy, options = LAYOUTS.get(layout, (1, "single", {}))
            fit(kind, strategy, options, replicas_of(layout), report=report)
        if layout in REFERENCES and torch.equal(report.weights["head.weight"], Net().double().head.weight):
            raise AssertionError(f"{kind} doesn't train")

    return reported(run)


def judge(
    entry: Entry, layout: Layout, reports: list[Report], plain: Report, fallback: Callable[[], list[Report]]
) -> Verdict:
    """The outcome of a case; arguments as `tools.zoo.outcome.judge`. Late stages are beside the same late gradients in
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
