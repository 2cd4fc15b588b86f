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
from lightning_parallel.schedules.asynchronous_v import AsyncV
from lightning_parallel.schedules.named import Endless, endless, placement_of
from lightning_parallel.schedules.steady import mean_ahead, steady


@dataclass(frozen=True)
class LateGradients:
    """The settings ``weights``, ``correction``, ``lr_discount``, ``extra_in_flight`` and ``schedule`` of
    :class:`~lightning_parallel.AsyncPipelineStrategy`. With 1F1B, a stage has the chunk of its own number.

    Methods take the number of microbatches of an update, in all its batches together.
    """

    weights: Stashing
    correction: Correction
    lr_discount: int | None
    extra_in_flight: int
    schedule: Endless = "1f1b"

    def actions(self, stages: int, stage: int) -> AsyncOneFOneB | AsyncV:
        """A stage's endless list of actions."""
        return endless(self.schedule, stages, stage, self.extra_in_flight)

    def in_v(self, stages: int) -> bool:
        """Has each stage two chunks?"""
        return self.schedule != "1f1b" and stages > 1

    def ahead(self, stages: int, chunk: int, microbatches: int = 1) -> float:
        """By how many microbatches a chunk's forwards are ahead of updates."""
        return mean_ahead(self.schedule, stages, chunk, microbatches, self.extra_in_flight)

    def staleness(self, stages: int, chunk: int, microbatches: int) -> float:
        """How many updates a chunk's gradients are late in the mean."""
        return mean_staleness(self.weights, self.ahead(stages, chunk, microbatches), microbatches)

    def wanted_microbatches(self, stages: int) -> int:
        """The fewest microbatches that leave the first stage's gradients less than half an update late."""
        return 2 * stages * (1 + self.extra_in_flight) if stages > 1 else 1

    def correction_factor(self, stages: int, chunk: int, microbatches: int) -> float:
        """The weight of the last update in the weights that a chunk's forwards read."""
        if self.correction is None:
            return 0.0  # how late a chunk is takes a while to count out
        return correction_weight(self.correction, self.weights, self.ahead(stages, chunk, microbatches), microbatches)

    def may_correct(self, stages: int, chunk: int) -> bool:
        """Will a chunk's forwards be corrected, with some number of microbatches?"""
        return bool(self.correction) and (self.in_v(stages) or self.correction_factor(stages, chunk, 1) > 0)

    def rate_factor(self, stages: int, chunk: int, microbatches: int, update: int) -> float:
        """The factor of a chunk's learning rate at an update (from 0)."""
        if self.lr_discount is None:
            return 1.0
        return discount(self.staleness(stages, chunk, microbatches), update, self.lr_discount)

    def copies(self, stages: int, chunk: int, microbatches: int) -> int:
        """The most copies of a chunk's weights that its stage holds besides its parameters."""
        if self.in_v(stages):
            assert self.schedule != "1f1b"
            late = steady(self.schedule, stages, microbatches).most[chunk]
            return late + (self.correction_factor(stages, chunk, microbatches) > 0)
        return copies(self.weights, self.correction, self.ahead(stages, chunk), microbatches)

    def description(self, stages: int, stage: int, microbatches: int) -> str:
        """The start table's text about a stage's gradients: in a V of its chunks in the mean."""
        chunks = [c for c, place in enumerate(placement_of(self.schedule, stages)) if place == stage]
        late = sum(self.staleness(stages, chunk, microbatches) for chunk in chunks) / len(chunks)
        if not late:
            return "not late"
        held = max(self.copies(stages, chunk, microbatches) for chunk in chunks)
        corrected = "" if self.correction is None else ", corrected"
        more = f", up to {held} more cop{'y' if held == 1 else 'ies'} of the weights" if held else ""
        return f"{late:.2g} update{'s' * (late != 1)} late{corrected}{more}"

    def check(self, stages: int, microbatches: int) -> None:
        """Refuse settings that can't run, and warn of those that train badly. Called when the microbatches of an update
        are known.

        Raises:
            ValueError: ``weights="2bw"`` with fewer microbatches than the first stage runs ahead.
        """
        ahead = self.ahead(stages, 0, microbatches)
        given = f"{microbatches} microbatch{'es' * (microbatches != 1)} an update"
        if self.weights == "2bw" and microbatches < ahead:
            raise ValueError(
                f"weights='2bw' with {given}: the first of {stages} stages runs {ahead:g} ahead, so it would need a "
                f"version that isn't there yet. Use at least {ahead:g} microbatches, microbatches='auto' with as many "
                f"samples a batch, or weights='stash'."
            )
        chunks = range(len(placement_of(self.schedule, stages)))
        late = max(self.staleness(stages, chunk, microbatches) for chunk in chunks)
        where = "latest chunk" if self.in_v(stages) else "first stage"
        if stages > 1 and (late > 1 or (self.correction is None and late > 0.5)):
            rank_zero_warn(
                f"{given}, weights={self.weights!r}, correction={self.correction!r}: gradients of the {where} are "
                f"{late:.2g} updates late, which costs quality (see the page on late gradients). Use "
                f"microbatches='auto' with at least {2 * stages} samples a batch, weights='stash' and "
                f"correction='second_order'."
            )
