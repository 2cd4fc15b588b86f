"""What the user of an asynchronous pipeline has chosen against late gradients: checked, and said in words and figures.

The formulas are :mod:`lightning_parallel.pipeline.staleness`'s. Here they meet a user: settings are refused, a choice
that is known to train badly is warned of, and the start banner says how late each stage's gradients will be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.pipeline.schedule import AsyncOneFOneB
from lightning_parallel.pipeline.staleness import (
    Correction,
    Stashing,
    copies,
    correction_weight,
    discount,
    known_cost,
    mean_staleness,
)


@dataclass(frozen=True)
class LateGradients:
    """The settings of :class:`~lightning_parallel.AsyncPipelineStrategy` that decide what late gradients do.

    Microbatches are those of an update, all its batches together.

    Raises:
        ValueError: a setting is none of those that there are.
    """

    weights: Stashing
    correction: Correction
    lr_discount: int | None
    extra_in_flight: int

    def __post_init__(self) -> None:
        if self.weights not in get_args(Stashing):
            raise ValueError(f"weights={self.weights!r}: choose one of {', '.join(map(repr, get_args(Stashing)))}.")
        number = isinstance(self.correction, int | float) and not isinstance(self.correction, bool)
        known = self.correction is None or self.correction in ("error_feedback", "second_order")
        if not (0 <= self.correction < math.inf if number else known):  # type: ignore[operator]
            raise ValueError(
                f"correction={self.correction!r}: choose 'second_order', 'error_feedback', None, or give the weight of "
                f"the last update, a number of at least 0."
            )
        until = self.lr_discount
        if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
            raise ValueError(f"lr_discount={until!r}: give a positive number of updates, or None.")
        extra = self.extra_in_flight
        if isinstance(extra, bool) or not isinstance(extra, int) or extra < 0:
            raise ValueError(f"extra_in_flight={extra!r}: give 0 or a positive integer.")

    def actions(self, stages: int, stage: int) -> AsyncOneFOneB:
        """A stage's endless list."""
        return AsyncOneFOneB(stages, stage, self.extra_in_flight)

    def ahead(self, stages: int, stage: int) -> int:
        """Forwards that a stage runs before the backward of the first of them."""
        return self.actions(stages, stage).warmup

    def wanted_microbatches(self, stages: int) -> int:
        """The fewest that leave the first stage's gradients less than half an update late."""
        return 2 * stages * (1 + self.extra_in_flight) if stages > 1 else 1

    def weight(self, stages: int, stage: int, microbatches: int) -> float:
        """Of the last update, in what a stage's forwards read."""
        return correction_weight(self.correction, self.weights, self.ahead(stages, stage), microbatches)

    def factor(self, stages: int, stage: int, microbatches: int, update: int) -> float:
        """On a stage's learning rate, at an update (from 0)."""
        late = mean_staleness(self.weights, self.ahead(stages, stage), microbatches)
        return discount(late, update, self.lr_discount)

    def description(self, stages: int, stage: int, microbatches: int) -> str:
        """Of a stage, for the banner."""
        ahead = self.ahead(stages, stage)
        late = mean_staleness(self.weights, ahead, microbatches)
        if not late:
            return "; no gradient is late"
        held = copies(self.weights, self.correction, ahead, microbatches)
        corrected = "" if self.correction is None else ", corrected"
        more = f", up to {held} more cop{'y' if held == 1 else 'ies'} of its weights" if held else ""
        return f"; gradients {late:.2g} update{'s' * (late != 1)} late{corrected}{more}"

    def check(self, stages: int, microbatches: int) -> None:
        """Refuse what can't run, and warn of what trains badly, once the microbatches of an update are known.

        Raises:
            ValueError: ``weights="2bw"`` with fewer microbatches than the first stage runs ahead.
        """
        ahead = self.ahead(stages, 0)
        given = f"{microbatches} microbatch{'es' * (microbatches != 1)} an update"
        if self.weights == "2bw" and microbatches < ahead:
            raise ValueError(
                f"weights='2bw' with {given}: the first of {stages} stages runs {ahead} ahead, so it would need a "
                f"version that isn't there yet. Use at least {ahead} microbatches, microbatches='auto' with as many "
                f"samples a batch, or weights='stash'."
            )
        late = mean_staleness(self.weights, ahead, microbatches)
        cost = known_cost(self.correction, late)
        if stages > 1 and cost is not None:
            rank_zero_warn(
                f"{given}, weights={self.weights!r}, correction={self.correction!r}: gradients of the first stage are "
                f"{late:.2g} updates late. {cost} Use microbatches='auto' with at least {2 * stages} samples a batch, "
                f"weights='stash' and correction='second_order'."
            )
