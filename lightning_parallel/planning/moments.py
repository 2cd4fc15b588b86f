"""The moment of a step at which a rank holds the most: of activations, gradients, and what is there for a moment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.profile import ChunkCost
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.order import BACKWARD, FIRST_HALF, FORWARD, SECOND_HALF, Order

_UPDATES = 4  # of the asynchronous pipeline, after which its messages come and go evenly
_STEPPED = 2  # tensors like the largest parameter that an optimizer's step makes


def held_and_fullest(
    choice: Choice,
    stage: int,
    chunks: Sequence[ChunkCost],
    gradients: Sequence[int],
    largest: int,
    *,
    whole: tuple[int, int] = (0, 0),
    averaged: int = 0,
) -> tuple[int, int]:
    """The bytes that forwards hold at the most, and those of the fullest moment besides parameters, the optimizer's
    state and copies.

    Args:
        gradients: bytes for each chunk, when all are there; 0 for those of other stages.
        largest: bytes of the rank's part of the largest parameter.
        whole: of gradients before ranks divide them: at the most in a backward, and at its end.
        averaged: of the messages in which replicas average gradients: all are there until the last has arrived.
    """
    made, steps = sum(gradients), max(_STEPPED * largest, averaged)
    if not choice.is_pipeline:
        # The gradients of the last batch are there until the backward begins.
        # When it ends, those of the last unit are there as they were made, and as they are sent.
        begins, ends = chunks[0].backward_peak + whole[0], made + 2 * whole[1]
        return chunks[0].held, max(made + steps, made + chunks[0].forward_peak, begins, ends)
    if choice.is_late:
        own = [chunk for chunk, place in zip(chunks, choice.placement, strict=True) if place == stage]
        held = sum(chunk.held for chunk in own)
        activations = (1 + AsyncOneFOneB(choice.stages, stage).warmup) * held
        more = max(max(chunk.forward_peak, chunk.backward_peak) - chunk.held for chunk in own)
        # An optimizer's step comes while forwards are in flight. On all stages but the last it leaves the change of
        # each weight, which corrects later forwards. And a batch's microbatches add to gradients of two versions: all
        # are there when a backward ends, which has let its activations go.
        twice = made + max(0, largest - held) if stage < choice.stages - 1 else 0
        return activations, made + activations + max(more, twice, steps)
    kinds, numbers = choice.order().by_stage[stage]
    activations, moment = _of_schedule(choice, kinds, numbers, chunks, gradients)
    # A second half's gradients are made all at once, and given to the averages one by one.
    fresh = largest if (kinds == SECOND_HALF).any() else 0
    return activations, max(made + max(steps, averaged + fresh), moment)


def message_buffers(choice: Choice, stage: int, chunks: Sequence[ChunkCost]) -> int:
    """The bytes of a stage's messages to and from others: buffers of those that it has sent, until it knows that they
    have arrived, and of the next one that it expects on each way. They stay for later batches."""
    if not choice.is_pipeline:
        return 0
    places, found = choice.placement, 0
    sent = _sent_at_once(choice.order(_UPDATES if choice.is_late else 1))
    for chunk in (number for number, place in enumerate(places) if place == stage):
        activations, gradients = sent[chunk]
        if chunk and places[chunk - 1] != stage:
            found += (1 + gradients) * chunks[chunk - 1].sent
        if chunk + 1 < len(places) and places[chunk + 1] != stage:
            found += (1 + activations) * chunks[chunk].sent
    return found


@cache
def _sent_at_once(order: Order) -> list[tuple[int, int]]:
    """For each chunk the most messages of activations, and of gradients, that it has sent and that aren't known to have
    arrived. A gradient confirms its activation; an activation confirms the gradients that its sender had then."""
    found: list[tuple[int, int]] = []
    had = np.zeros(0, dtype=np.intp)  # at each forward of the chunk before, the backwards that it has run
    for chunk, place in enumerate(order.places):
        kinds, numbers = order.by_stage[place]
        backward = (kinds == BACKWARD) | (kinds == FIRST_HALF)
        own = backward & (numbers == chunk)
        begun, ended = np.cumsum((kinds == FORWARD) & (numbers == chunk)), np.cumsum(own)
        gradients = 0
        if chunk:
            confirmed = np.concatenate(([0], had[begun[own] - 1][:-1]))  # before each gradient is sent
            gradients = int((ended[own] - confirmed).max())
        found.append((int((begun - ended).max()), gradients))
        had = ended[(kinds == FORWARD) & (numbers == chunk)]
    return found


def _of_schedule(
    choice: Choice,
    kinds: NDArray[np.intp],
    numbers: NDArray[np.intp],
    chunks: Sequence[ChunkCost],
    gradients: Sequence[int],
) -> tuple[int, int]:
    """What a stage's list holds, by the kinds of its actions and the numbers of their chunks."""
    names = ("held", "between", "forward_peak", "backward_peak")
    held, between, forward, backward = (np.array([getattr(chunk, name) for chunk in chunks]) for name in names)
    # The gradients of all the chunk's weights are there before they are added to the others.
    second = np.array(gradients)
    zero = np.zeros_like(held)
    # Copies that a chunk leaves for later ones of its stage, and gets from earlier ones; their gradients go back.
    given, got = _handed(choice.placement, chunks)
    # By kind, in the order of FORWARD, BACKWARD, FIRST_HALF and SECOND_HALF: what is let go before an action, what is
    # there for a moment, and what is held after it.
    less = np.stack([got, held + given, held + given, zero])[kinds, numbers]
    moment = np.stack([forward, backward, backward, second])[kinds, numbers]
    more = np.stack([held + given, got, between + got, -between])[kinds, numbers]
    after = np.cumsum(more - less)
    ends = (kinds == BACKWARD) | (kinds == SECOND_HALF)
    there = np.zeros(len(kinds), dtype=np.int64)  # gradients of each chunk, after its first backward that makes them
    for chunk in np.unique(numbers):
        own = ends & (numbers == chunk)
        there += (np.cumsum(own) - own > 0) * gradients[chunk]
    return int(after.max(initial=0)), int((after - more + there + moment).max(initial=0))


def _handed(places: Placement, chunks: Sequence[ChunkCost]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The bytes that each chunk leaves for later ones of its stage, and that it gets from earlier ones."""
    given, got = (np.array([getattr(chunk, name) for chunk in chunks]) for name in ("stays", "awaited"))
    for number in range(1, len(chunks)):
        if places[number - 1] == places[number]:
            given[number - 1] += chunks[number - 1].sent
            got[number] += chunks[number - 1].sent
    return given, got
