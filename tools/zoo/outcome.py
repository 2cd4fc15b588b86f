"""Compares what the ranks of a layout report with one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

from lightning_parallel.comparison.differences import apart, distance
from tools.zoo.entry import Entry
from tools.zoo.layouts import TIMEOUT, Layout
from tools.zoo.training import Report

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}
SMALLEST = 1e-3  # what a deviation is divided by, at least
_WAITED = re.compile(r"time[d ]*out|did not answer|had not answered", re.IGNORECASE)
_BROKEN = re.compile(r"broke|closed by peer|connection reset", re.IGNORECASE)


class Outcome(StrEnum):
    """How a layout's training ended beside that of one process, the best first."""

    EQUAL = "equal"
    BY_NATURE = "different by nature"
    REFUSED = "refused"
    DIFFERENT = "DIFFERENT"
    CRASHED = "crashed"
    HANG = "hang"

    @property
    def is_wrong(self) -> bool:
        """Whether nobody should ever see it."""
        return self in (Outcome.DIFFERENT, Outcome.CRASHED, Outcome.HANG)

    def is_worse_than(self, other: Outcome) -> bool:
        """A wrong outcome isn't worse than another wrong one."""
        order = [Outcome.EQUAL, Outcome.BY_NATURE, Outcome.REFUSED]
        ranks = [order.index(outcome) if outcome in order else len(order) for outcome in (self, other)]
        return ranks[0] > ranks[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and why.

    Attributes:
        outcome: of the case.
        detail: the message of a refusal or an error, where a difference is largest, or why it is there by nature.
        deviation: the largest of a loss or a weight, relative; None if nothing could be compared.
        trace: of an error that isn't a refusal.
    """

    outcome: Outcome
    detail: str = ""
    deviation: float | None = None
    trace: str = ""


def judge(
    entry: Entry, layout: Layout, reports: list[Report], plain: Report, fallback: Callable[[], list[Report]]
) -> Verdict:
    """The outcome of a case.

    Args:
        entry: what was trained.
        layout: under which layout.
        reports: of its ranks.
        plain: of the plain Trainer on the whole batch.
        fallback: makes the reports of the layout's fallback, for an entry that differs by nature.
    """
    failed = of_errors(reports)
    if failed is not None:
        return failed
    tolerance = TOLERANCES[entry.dtype]
    deviation, where = largest(reports, [plain], layout.shares)
    if deviation <= tolerance:
        return Verdict(Outcome.EQUAL, deviation=deviation)
    if entry.by_nature is None or entry.by_nature not in layout.natures:
        return Verdict(Outcome.DIFFERENT, f"largest in {where}", deviation)
    if layout.fallback is not None:
        others = fallback()
        for report in others:
            if report.error is not None:
                return Verdict(Outcome.CRASHED, f"{layout.fallback}: {report.error.message}", trace=report.error.trace)
        beside, where = largest(reports, others, layout.shares)
        if not beside <= tolerance:
            return Verdict(Outcome.DIFFERENT, f"from {layout.fallback} too, largest in {where}", beside)
    return Verdict(Outcome.BY_NATURE, entry.by_nature, deviation)


def of_errors(reports: list[Report]) -> Verdict | None:
    """The verdict on ranks of which at least one has raised; None if none has."""
    errors = [report.error for report in reports if report.error is not None]
    if not errors:
        return None
    waited = [error for error in errors if error.seconds >= TIMEOUT and _WAITED.search(error.message)]
    causes = [error for error in errors if error not in waited and not _BROKEN.search(error.message)]
    if waited and not causes:  # with a cause, a user's process would have ended, and the others with it
        return Verdict(Outcome.HANG, waited[0].message, trace=waited[0].trace)
    cause = (causes or errors)[0]
    refused = (
        len(errors) == len(reports)
        and len(causes) == len(errors)
        and all(error.is_refusal for error in errors)
        and len({error.kind for error in errors}) == 1
        and all(report.updates == 0 for report in reports)
    )
    if refused:
        return Verdict(Outcome.REFUSED, cause.message, trace=cause.trace)
    ranks = f"{len(errors)} of {len(reports)} ranks, after {max(report.updates for report in reports)} updates"
    if causes and len(causes) < len(errors):
        ranks += f", {len(errors) - len(causes)} of them only lost the others"
    return Verdict(Outcome.CRASHED, f"{cause.kind} ({ranks}): {cause.message}", trace=cause.trace)


def largest(reports: list[Report], reference: list[Report], shares: bool) -> tuple[float, str]:
    """The largest relative deviation, and where it is. A weight that no rank holds, or a NaN of a layout alone, is an
    infinite one."""
    if any(len(report.losses) != len(reference[0].losses) for report in (*reports, *reference)):
        return math.inf, "the number of losses"
    deviations = {}
    for step, expected in enumerate(_losses(reference, shares)):
        found = {"": _losses(reports, shares)[step]} if shares else {
            f" on rank {rank}": report.losses[step] for rank, report in enumerate(reports)
        }  # fmt: skip
        for rank, loss in found.items():
            deviations[f"loss of step {step}{rank}"] = apart(loss, expected, SMALLEST)
    weights = reference[0].weights
    held: set[str] = set()
    for report in reports:
        for name, weight in report.weights.items():
            if name not in weights:
                return math.inf, f"{name}, which one process doesn't have"
            held.add(name)
            deviation = distance(weight, weights[name], report.shards.get(name), SMALLEST)
            deviations[name] = max(deviation, deviations.get(name, 0.0))
    missing = sorted(weights.keys() - held)
    if missing:
        return math.inf, f"{missing[0]}, which no rank holds"
    if not deviations:
        return math.inf, "nothing"
    where = max(deviations, key=deviations.__getitem__)
    return deviations[where], where


def _losses(reports: list[Report], shares: bool) -> list[float]:
    """One a step: with shares the mean over ranks, else the first rank's."""
    if not shares:
        return reports[0].losses
    return [sum(losses) / len(reports) for losses in zip(*(report.losses for report in reports), strict=True)]
