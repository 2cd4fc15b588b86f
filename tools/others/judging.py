"""Compares what the ranks of a layout report with one process.

No list says which of these modules are different by nature. It is found by three signs: the numbers aren't those of one
process; they are those of the same division of the batch without other ranks; and a step draws random numbers, or the
strategy has warned. Any other difference is a silent one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tools.others.entry import Entry
from tools.zoo.entry import Nature
from tools.zoo.layouts import PLAIN, REPLICAS, Layout
from tools.zoo.outcome import Outcome, Verdict, largest, of_errors
from tools.zoo.training import Report

# Users' optimizers are Adam more often than not: a gradient that is zero but for rounding, as that of a bias before
# BatchNorm, is a step for it. In float64 that is a millionth of a full step. In float32 it is a full one, so there the
# losses alone are compared, the second of which is made by updated weights.
TOLERANCES = {torch.float64: 2e-6, torch.float32: 1e-4}
_FIX = "microbatches=1"  # what a warning of other numbers than one process's advises


def judge(
    entry: Entry, layout: Layout, reports: list[Report], plain: Report, fallback: Callable[[], list[Report]]
) -> Verdict:
    """The outcome of a case; arguments as `tools.zoo.outcome.judge`."""
    failed = of_errors(reports)
    if failed is not None:
        crashed_in_replicas = failed.outcome == Outcome.CRASHED and layout.fallback == REPLICAS
        if crashed_in_replicas and _messages(reports) == _messages(fallback()):
            return Verdict(Outcome.BY_NATURE, "fails as under Lightning's DDP")
        return failed
    tolerance = TOLERANCES[entry.dtype]
    reports, (plain,) = _comparable(entry, reports), _comparable(entry, [plain])
    deviation, where = largest(reports, [plain], layout.shares)
    if deviation <= tolerance:
        return Verdict(Outcome.EQUAL, deviation=deviation)
    warned = next((said for report in reports for said in report.warnings if _FIX in said), None)
    if layout.fallback is None:
        if plain.draws or any(report.draws for report in reports):
            return Verdict(Outcome.BY_NATURE, Nature.DRAWS, deviation)
        return Verdict(Outcome.DIFFERENT, f"from {PLAIN}, largest in {where}; warned: {warned}", deviation)
    others = _comparable(entry, fallback())
    for report in others:
        if report.error is not None:
            beside, where = math.inf, f"an error under {layout.fallback}: {report.error.message}"
            break
    else:
        beside, where = largest(reports, others, layout.shares)
    if not beside <= tolerance:
        if layout.fallback == REPLICAS and [r.batches for r in reports] != [r.batches for r in others]:
            return Verdict(Outcome.BY_NATURE, "each replica's loader draws samples of its own", deviation)
        said = f"from {PLAIN} by {deviation:.0e} and from {layout.fallback}, largest in {where}; warned: {warned}"
        return Verdict(Outcome.DIFFERENT, said, beside)
    if layout.fallback == REPLICAS:
        return Verdict(Outcome.BY_NATURE, "as under Lightning's DDP", deviation)
    if warned is None and not plain.draws:
        return Verdict(Outcome.DIFFERENT, f"as {layout.fallback}, without a warning", deviation)
    return Verdict(Outcome.BY_NATURE, Nature.DRAWS if plain.draws else f"warned: {warned}", deviation)


def _messages(reports: list[Report]) -> list[str | None]:
    return [None if report.error is None else report.error.message for report in reports]


def _comparable(entry: Entry, reports: list[Report]) -> list[Report]:
    return reports if entry.dtype == torch.float64 else [replace(report, weights={}) for report in reports]
