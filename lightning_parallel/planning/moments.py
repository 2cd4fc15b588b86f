"""The moment of a step at which a rank holds the most: of activations, gradients, and what is there for a moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.profile import ChunkCost
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.order import BACKWARD, FIRST_HALF

_STEPPED = 2  # tensors like the largest parameter that an optimizer's step makes


def held_and_fullest(
    choice: Choice,
    stage: int,
    chunks: Sequence[ChunkCost],
    gradients: int,
    largest: int,
    whole: int = 0,
) -> tuple[int, int]:
    """The bytes that forwards hold at the most, and those of the fullest moment besides parameters, the optimizer's
    state and copies.

    Args:
        gradients: bytes, when all are there.
        largest: of the largest parameter, of the rank's part of it.
        whole: of gradients in a backward, before ranks divide them.
    """
    steps = _STEPPED * largest
    if not choice.is_pipeline:
        # The gradients of the last batch are there until the backward begins.
        moment = max(gradients + steps, gradients + chunks[0].forwards, chunks[0].backwards + whole)
        return chunks[0].held, moment
    if choice.is_late:
        own = [chunk for chunk, place in zip(chunks, choice.placement, strict=True) if place == stage]
        activations = (1 + AsyncOneFOneB(choice.stages, stage).warmup) * sum(chunk.held for chunk in own)
        more = max(max(chunk.forwards, chunk.backwards) - chunk.held for chunk in own)
        # Forwards are under way at each step. But on the last stage, its change of all weights corrects later ones.
        change = gradients if stage < choice.stages - 1 else 0
        return activations, gradients + activations + max(more, steps, change)
    kinds, numbers = choice.order().by_stage[stage]
    activations, moment = _of_schedule(kinds, numbers, chunks, gradients)
    return activations, max(gradients + steps, moment)


def _of_schedule(
    kinds: NDArray[np.intp], numbers: NDArray[np.intp], chunks: Sequence[ChunkCost], gradients: int
) -> tuple[int, int]:
    """What a stage's list holds, by the kinds of its actions and the numbers of their chunks."""
    held, between, forwards, backwards = (
        np.array([getattr(chunk, name) for chunk in chunks]) for name in ("held", "between", "forwards", "backwards")
    )
    # The gradients of all the chunk's weights are there before they are added to the others.
    second = np.full(len(chunks), gradients // len(np.unique(numbers)))
    zero = np.zeros_like(held)
    # By kind: what is let go before an action, what is there for a moment, and what is held after it.
    less = np.stack([zero, held, held, zero])[kinds, numbers]
    moment = np.stack([forwards, backwards, backwards, second])[kinds, numbers]
    more = np.stack([held, zero, between, -between])[kinds, numbers]
    after = np.cumsum(more - less)
    backward = (kinds == BACKWARD) | (kinds == FIRST_HALF)
    there = np.where(np.cumsum(backward) - backward > 0, gradients, 0)  # from the first backward on
    return int(after.max(initial=0)), int((after - more + there + moment).max(initial=0))
