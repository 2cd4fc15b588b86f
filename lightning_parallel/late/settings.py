"""The settings of an asynchronous pipeline about late gradients, the warnings about them, and their part of the start
table.

The formulas are in :mod:`lightning_parallel.pipeline.staleness`. This module warns of settings that are known to train
badly, and says at the start how late each stage's gradients will be.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.pipeline.staleness import (
    Correction,
    Stashing,
    copies,
    correction_weight,
    discount,
    mean_staleness,
)
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB


@dataclass(frozen=True)
class LateGradients:
    """The settings ``weights``, ``correction``, ``lr_discount`` and ``extra_in_flight`` of
    :class:`~lightning_parallel.AsyncPipelineStrategy`.

    Methods take the number of microbatches of an update, in all its batches together.
    """

    weights: Stashing
    correction: Correction
    lr_discount: int | None
    extra_in_flight: int

    def actions(self, stages: int, stage: int) -> AsyncOneFOneB:
        """A stage's endless list of actions."""
        return AsyncOneFOneB(stages, stage, self.extra_in_flight)

    def ahead(self, stages: int, stage: int) -> int:
        """The number of forwards that a stage runs before the backward of the first of them."""
        return self.actions(stages, stage).warmup

    def wanted_microbatches(self, stages: int) -> int:
        """The fewest microbatches that leave the first stage's gradients less than half an update late."""
        return 2 * stages * (1 + self.extra_in_flight) if stages > 1 else 1

    def correction_factor(self, stages: int, stage: int, microbatches: int) -> float:
        """The weight of the last update in the weights that a stage's forwards read."""
        return correction_weight(self.correction, self.weights, self.ahead(stages, stage), microbatches)

    def rate_factor(self, stages: int, stage: int, microbatches: int, update: int) -> float:
        """The factor of a stage's learning rate at an update (from 0)."""
        late = mean_staleness(self.weights, self.ahead(stages, stage), microbatches)
        return discount(late, update, self.lr_discount)

    def copies(self, stages: int, stage: int, microbatches: int) -> int:
        """The most copies of a stage's weights that it holds besides its parameters."""
        return copies(self.weights, self.correction, self.ahead(stages, stage), microbatches)

    def description(self, stages: int, stage: int, microbatches: int) -> str:
        """The start table's text about a stage's gradients."""
        late = mean_staleness(self.weights, self.ahead(stages, stage), microbatches)
        if not late:
            return "not late"
        held = self.copies(stages, stage, microbatches)
        corrected = "" if self.correction is None else ", corrected"
        more = f", up to {held} more cop{'y' if held == 1 else 'ies'} of the weights" if held else ""
        return f"{late:.2g} update{'s' * (late != 1)} late{corrected}{more}"

    def check(self, stages: int, microbatches: int) -> None:
        """Refuse settings that can't run, and warn of those that train badly. Called when the microbatches of an update
        are known.

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
        if stages > 1 and (late > 1 or (self.correction is None and late > 0.5)):
            rank_zero_warn(
                f"{given}, weights={self.weights!r}, correction={self.correction!r}: gradients of the first stage are "
                f"{late:.2g} updates late, which costs quality (see the page on late gradients). Use "
                f"microbatches='auto' with at least {2 * stages} samples a batch, weights='stash' and "
                f"correction='second_order'."
            )
