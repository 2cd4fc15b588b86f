"""The moment of a step at which a rank holds the most: of activations, gradients, and what is there for a moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import assert_never

from lightning_parallel.backward.split import AT_A_TIME
from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.gradients.averaging import BUCKET_BYTES
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Step
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.simulate import Order

_UPDATES = 4  # of the asynchronous pipeline, after which its messages come and go evenly
_STEPPED = 2  # tensors like the largest parameter that an optimizer's step makes


def held_and_fullest(
    choice: Choice,
    stage: int,
    chunks: Sequence[ChunkCost],
    gradients: Sequence[int],
    largest: int,
    *,
    averaged: Sequence[int],
    undivided: int = 0,
    last_undivided: int = 0,
) -> tuple[int, int]:
    """The bytes that forwards hold at the most, and those of the fullest moment besides parameters, the optimizer's
    state and copies.

    Args:
        gradients: bytes for each chunk, when all are there; 0 for those of other stages.
        largest: bytes of the rank's part of the largest parameter.
        averaged: the part of ``gradients`` that replicas average in messages, which stay until the last has arrived.
        undivided: the most bytes of gradients at once that fully sharded replicas haven't divided yet.
        last_undivided: those of the last unit of a backward.
    """
    made, steps = sum(gradients), max(_STEPPED * largest, sum(averaged))
    if not choice.is_pipeline:
        # The gradients of the last batch are there until the backward begins. When it ends, those of the last unit are
        # there as they were made, and as they are sent.
        backward, end = chunks[0].backward_peak + undivided, made + 2 * last_undivided
        return chunks[0].held, max(made + steps, made + chunks[0].forward_peak, backward, end)
    if choice.is_late:
        own = [chunks[number] for number in choice.chunks_of(stage)]
        held = sum(chunk.held for chunk in own)
        activations = (1 + AsyncOneFOneB(choice.stages, stage).warmup) * held
        more = max(max(chunk.forward_peak, chunk.backward_peak) - chunk.held for chunk in own)
        change = end = 0
        if stage < choice.stages - 1:
            # An optimizer's step comes while forwards are in flight. It leaves the change of each weight, which
            # corrects later forwards.
            change = made
            # A batch's microbatches add to gradients of two versions. At a backward's end both are there, and the last
            # weight's fresh one. What its forward held isn't.
            end = made + largest - held
        return activations, made + activations + max(more, change, end, steps)
    actions = choice.order().schedule[stage]
    activations, moment = _of_schedule(choice, actions, chunks, gradients, averaged, largest)
    return activations, max(made + steps, moment)


def message_buffers(choice: Choice, stage: int, chunks: Sequence[ChunkCost]) -> int:
    """The bytes of a stage's messages to and from others: buffers of those that it has sent, until it knows that they
    have arrived, and of the next one that it expects on each way. They stay for later batches."""
    if not choice.is_pipeline:
        return 0
    places, found = choice.placement, 0
    sent = _sent_at_once(choice.order(_UPDATES if choice.is_late else 1))
    for chunk in choice.chunks_of(stage):
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
    had: list[int] = []  # at each forward of the chunk before, the gradients that it had
    for chunk, place in enumerate(order.places):
        begun = ended = confirmed = activations = gradients = 0
        has: list[int] = []
        for action in order.schedule[place]:
            if isinstance(action, Step | BackwardWeight) or action.chunk != chunk:
                continue
            if isinstance(action, Forward):
                begun += 1
                has.append(ended)
                activations = max(activations, begun - ended)
            elif isinstance(action, Backward | BackwardInput):
                ended += 1
                gradients = max(gradients, ended - confirmed) if chunk else 0
                confirmed = had[begun - 1] if chunk else 0
            else:
                assert_never(action)
        found.append((activations, gradients))
        had = has
    return found


def _of_schedule(
    choice: Choice,
    actions: Sequence[Action],
    chunks: Sequence[ChunkCost],
    gradients: Sequence[int],
    averaged: Sequence[int],
    largest: int,
) -> tuple[int, int]:
    """What a stage's list holds: the most between actions, and the most in one."""
    own = [action for action in actions if not isinstance(action, Step)]
    # Second halves make so many weights' gradients before they add them. Layers that run again leave none for them.
    fresh = 0 if choice.recompute else AT_A_TIME + largest
    given, got = _handed(choice.placement, chunks)
    to_come = Counter(action.chunk for action in own if isinstance(action, Backward | BackwardWeight))
    begun: set[int] = set()
    held = most = fullest = made = complete = 0
    for action in own:
        chunk = action.chunk
        cost = chunks[chunk]
        if isinstance(action, Forward):
            before, moment, after = -got[chunk], cost.forward_peak, cost.held + given[chunk]
        elif isinstance(action, BackwardWeight):
            before, moment, after = 0, min(gradients[chunk], fresh), -cost.held
        elif isinstance(action, Backward | BackwardInput):
            between = cost.held if isinstance(action, BackwardInput) else 0
            before, moment, after = -cost.held - given[chunk], cost.backward_peak, between + got[chunk]
        else:
            assert_never(action)
        sent = complete // BUCKET_BYTES * BUCKET_BYTES  # a message leaves when all that is in it is complete
        fullest = max(fullest, held + before + moment + made + sent)
        held += before + after
        most = max(most, held)
        if isinstance(action, Backward | BackwardWeight):
            made += 0 if chunk in begun else gradients[chunk]
            begun.add(chunk)
            to_come[chunk] -= 1
            complete += 0 if to_come[chunk] else averaged[chunk]
    # The last second half hands its gradients to the averages one by one.
    last = largest if sum(averaged) and any(isinstance(action, BackwardWeight) for action in own) else 0
    return most, max(fullest, sum(gradients) + sum(averaged) + last)


def _handed(places: Placement, chunks: Sequence[ChunkCost]) -> tuple[list[int], list[int]]:
    """The bytes of the copies that each chunk leaves for later ones of its stage, and that it gets from earlier ones.
    Their gradients go back."""
    given, got = [chunk.stays for chunk in chunks], [chunk.awaited for chunk in chunks]
    for number in range(1, len(chunks)):
        if places[number - 1] == places[number]:
            given[number - 1] += chunks[number - 1].sent
            got[number] += chunks[number - 1].sent
    return given, got
