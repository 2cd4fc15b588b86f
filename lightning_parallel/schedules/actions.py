"""What a schedule is made of: actions on chunks, and the messages that they imply.

The calls of a step are cut into *chunks*, numbered in the order of a forward. A stage runs one chunk or several. A
schedule has a list of actions for each stage; a chunk belongs to the stage whose list has its forwards::

    one chunk a stage              two chunks a stage, in a loop        two chunks a stage, in a V

    stage 0    chunk 0             stage 0    chunks 0, 3               stage 0    chunks 2, 3
    stage 1    chunk 1             stage 1    chunks 1, 4               stage 1    chunks 1, 4
    stage 2    chunk 2             stage 2    chunks 2, 5               stage 2    chunks 0, 5

The last chunk, which computes the loss, is always on the last stage. So the first one is there too in a V.

A backward may come in two halves. `BackwardInput` computes what the chunk before waits for. `BackwardWeight` computes
the gradients of weights, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from lightning_parallel.ranks.layout import Placement


@dataclass(frozen=True, slots=True)
class _OnChunk:
    """What a chunk does for a microbatch."""

    chunk: int
    microbatch: int


class Forward(_OnChunk):
    """Run a chunk's layers on a microbatch. Its activations are held until its backward."""


class Backward(_OnChunk):
    """Run the whole backward of a microbatch. Its gradients are added to those of the update under way."""


class BackwardInput(_OnChunk):
    """Run the first half of a backward: the gradient of the chunk's input, and of parameters that can't wait."""


class BackwardWeight(_OnChunk):
    """Run the second half of a backward: the gradients that were left for later."""


@dataclass(frozen=True, slots=True)
class Step:
    """Update a stage's parameters with the gradients of the backwards since its last `Step`."""

    stage: int
    update: int


@dataclass(frozen=True, slots=True)
class StepOfChunk(Step):
    """Update the parameters of one of a stage's chunks, with the gradients of its backwards since its last step."""

    chunk: int


# Unions, not base classes: a reader of lists that ends with `assert_never` has to know all actions, or mypy names it.
OnChunk: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Action: TypeAlias = OnChunk | Step
KINDS = (Forward, Backward, BackwardInput, BackwardWeight, Step, StepOfChunk)
Schedule: TypeAlias = list[list[Action]]  # the index is the stage


class Message(NamedTuple):
    """A message over a cut, for one microbatch. Cut c lies between the chunks c and c + 1."""

    kind: Literal["activation", "gradient"]
    cut: int
    microbatch: int


def needed(action: Action, chunks: int) -> Message | None:
    """The message that an action waits for; None if it needs none.

    Args:
        chunks: the number of chunks on all stages.
    """
    if isinstance(action, Forward) and action.chunk > 0:
        return Message("activation", action.chunk - 1, action.microbatch)
    if isinstance(action, Backward | BackwardInput) and action.chunk < chunks - 1:
        return Message("gradient", action.chunk, action.microbatch)
    return None


def sent(action: Action, chunks: int) -> Message | None:
    """The message that an action sends; None if it sends none. Arguments as of :func:`needed`."""
    if isinstance(action, Forward) and action.chunk < chunks - 1:
        return Message("activation", action.chunk, action.microbatch)
    if isinstance(action, Backward | BackwardInput) and action.chunk > 0:
        return Message("gradient", action.chunk - 1, action.microbatch)
    return None


def placement(schedule: Sequence[Sequence[Action]]) -> Placement:
    """The stage of each chunk, read off the lists.

    Raises:
        ValueError: a chunk is on two stages, or on none; or a stage has none, or the last one hasn't the last chunk.
    """
    found: dict[int, int] = {}
    for stage, actions in enumerate(schedule):
        chunks = {action.chunk for action in actions if isinstance(action, Forward)}
        if not chunks:
            raise ValueError(f"stage {stage} has no forwards: give it a chunk, or use fewer stages.")
        for chunk in sorted(chunks):
            if chunk in found:
                raise ValueError(f"chunk {chunk} is on the stages {found[chunk]} and {stage}: give it to one of them.")
            found[chunk] = stage
    for stage, actions in enumerate(schedule):
        for action in actions:
            if isinstance(action, OnChunk) and found.get(action.chunk) != stage:
                raise ValueError(f"stage {stage}: {action} comes without a forward of its chunk there.")
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"the chunks are {sorted(found)}: number them 0, 1, 2, ... in the order of a forward.")
    if found[len(found) - 1] != len(schedule) - 1:
        raise ValueError(
            f"the last chunk, {len(found) - 1}, is on stage {found[len(found) - 1]} of {len(schedule)}: put it on the "
            f"last stage, where losses and logs are expected."
        )
    return tuple(found[chunk] for chunk in range(len(found)))
