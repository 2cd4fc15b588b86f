"""The moment of a step at which a rank holds the most: of activations, gradients, and what is there for a moment."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.profile import ChunkCost
from lightning_parallel.schedules.actions import Action, Backward, BackwardInput, Forward, Step

_STEPPED = 2  # tensors like the largest parameter that an optimizer's step makes


def fullest(
    choice: Choice,
    stage: int,
    chunks: Sequence[ChunkCost],
    gradients: int,
    activations: int,
    largest: int,
    whole: int = 0,
) -> int:
    """Bytes besides parameters, the optimizer's state and copies.

    Args:
        gradients: when all are there.
        activations: what forwards hold at the most.
        largest: of the largest parameter, of the rank's part of it.
        whole: of gradients in a backward, before ranks divide them.
    """
    steps = _STEPPED * largest
    if not choice.is_pipeline:
        # The gradients of the last batch are there until the backward begins.
        return max(gradients + steps, gradients + chunks[0].forwards, chunks[0].backwards + whole)
    if choice.is_late:
        own = [chunk for chunk, place in zip(chunks, choice.placement, strict=True) if place == stage]
        more = max(max(chunk.forwards, chunk.backwards) - chunk.held for chunk in own)
        # Forwards are under way at each step. But on the last stage, its change of all weights corrects later ones.
        change = gradients if stage < choice.stages - 1 else 0
        return gradients + activations + max(more, steps, change)
    return max(gradients + steps, _of_schedule(choice.schedule()[stage], chunks, gradients))


def _of_schedule(actions: Sequence[Action], chunks: Sequence[ChunkCost], gradients: int) -> int:
    held = most = there = 0
    own = len({action.chunk for action in actions if not isinstance(action, Step)})
    for action in actions:
        if isinstance(action, Step):
            continue
        chunk = chunks[action.chunk]
        if isinstance(action, Forward):
            most = max(most, held + there + chunk.forwards)
            held += chunk.held
        elif isinstance(action, Backward | BackwardInput):
            held -= chunk.held
            most = max(most, held + there + chunk.backwards)
            there = gradients  # from the first backward on
            held += chunk.between if isinstance(action, BackwardInput) else 0
        else:
            # The gradients of all the chunk's weights are there before they are added to the others.
            most = max(most, held + there + gradients // own)
            held -= chunk.between
    return most
