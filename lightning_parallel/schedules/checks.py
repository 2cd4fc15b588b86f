"""Checks that a schedule can run and counts every microbatch once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import assert_never

from lightning_parallel.schedules.actions import (
    KINDS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Schedule,
    Step,
    StepOfChunk,
    needed,
    placement,
    sent,
)
from lightning_parallel.schedules.generators import Generator


def of_one_update(generator: Generator, stages: int, microbatches: int) -> Schedule:
    """The lists that a generator makes, checked: each microbatch once, in order, and one step at the end.

    Raises:
        ValueError: it names the generator, and what is wrong with its lists.
    """
    function = generator.func if isinstance(generator, partial) else generator
    name = getattr(function, "__name__", repr(function))
    try:
        made = generator(stages, microbatches)
        if len(made) != stages:
            raise ValueError(f"there are {len(made)} lists for {stages} stages.")
        validate(made)
        first = made[placement(made)[0]]  # all chunks have the same order
        numbers = [action.microbatch for action in first if isinstance(action, Forward) and action.chunk == 0]
        if numbers != list(range(microbatches)):
            raise ValueError(
                f"chunk 0: the forwards are of {numbers}, not of microbatches 0 to {microbatches - 1} in this order."
            )
        for stage, actions in enumerate(made):
            if sum(isinstance(action, Step) for action in actions) != 1 or not isinstance(actions[-1], Step):
                raise ValueError(f"stage {stage}: an update has one Step, at its end.")
    except ValueError as error:
        raise ValueError(f"schedule={name}, {stages} stages, {microbatches} microbatches: {error}") from None
    return made


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run and counts every microbatch once.

    Actions are of the kinds that there are (:data:`~.actions.KINDS`). On every chunk, each forward has one backward,
    whole or in two halves, and backwards run in the order of the forwards; so do second halves. Steps are numbered 0,
    1, 2, ..., those of a chunk by themselves. The backwards between two of them are the same microbatches on all
    chunks, and none is left after the last. Where a stage's chunks have steps of their own, the later one makes an
    update first. Between neighbouring chunks, messages are used in the order in which they are sent. Together, no
    stage waits for what will never come.

    Raises:
        ValueError: it names the stage or the chunk, and the action.
    """
    if not schedule:
        raise ValueError("The schedule has no stages.")
    for stage, actions in enumerate(schedule):
        _validate_stage(stage, actions)
    orders = [_orders(chunk, schedule[stage]) for chunk, stage in enumerate(placement(schedule))]
    kinds = ("forward of microbatch", "backward of microbatch", "update by microbatches")
    for chunk, (before, here) in enumerate(pairwise(orders), start=1):
        for kind, own, others in zip(kinds, here, before, strict=True):
            for mine, theirs in zip_longest(own, others, fillvalue="none"):
                if mine != theirs:
                    raise ValueError(f"chunk {chunk}: {kind} {mine} comes where chunk {chunk - 1} has {theirs}.")
    for _ in dependency_order(schedule):
        pass


def _validate_stage(stage: int, actions: Sequence[Action]) -> None:
    """Check the steps of a stage, and that each backward comes after its forward."""
    done: set[Action] = set()
    chunks = sorted({action.chunk for action in actions if not isinstance(action, Step)})
    steps = dict.fromkeys(chunks, 0)
    pending: set[int] = set()  # chunks with backwards since their last step
    for action in actions:
        where = f"stage {stage}: {action}"
        if type(action) not in KINDS:
            raise ValueError(f"{where} is none of {', '.join(kind.__name__ for kind in KINDS)}. Use these.")
        if isinstance(action, Step):
            own = [action.chunk] if isinstance(action, StepOfChunk) else chunks
            due = steps[own[0]]
            if action.stage != stage:
                raise ValueError(f"{where} belongs to another stage.")
            if action.update != due:
                raise ValueError(f"{where} comes where update {due} is due.")
            if not pending.intersection(own):
                raise ValueError(f"{where} has no backward before it.")
            if any(steps[later] <= due for later in chunks if later > max(own)):
                raise ValueError(f"{where} comes before that of a later chunk.")
            steps.update(dict.fromkeys(own, due + 1))
            pending.difference_update(own)
            continue
        if action in done:
            raise ValueError(f"{where} comes twice.")
        done.add(action)
        place = action.chunk, action.microbatch
        if isinstance(action, Backward | BackwardInput) and Forward(*place) not in done:
            raise ValueError(f"{where} comes before its forward.")
        if isinstance(action, BackwardWeight) and BackwardInput(*place) not in done:
            raise ValueError(f"{where} comes before its BackwardInput.")
        if isinstance(action, Backward | BackwardInput | BackwardWeight):
            pending.add(action.chunk)
        elif not isinstance(action, Forward):
            assert_never(action)
    if pending or not any(steps.values()):
        raise ValueError(f"stage {stage}: after {actions[-1] if actions else 'no action'} a Step is missing.")


def _orders(chunk: int, actions: Sequence[Action]) -> tuple[Sequence[object], ...]:
    """What the chunks must agree on: the orders of forwards and of backwards, and the microbatches of each update."""
    own = [action for action in actions if getattr(action, "chunk", chunk) == chunk]  # a plain Step is of all chunks
    forwards = [action.microbatch for action in own if isinstance(action, Forward)]
    backwards = [action.microbatch for action in own if isinstance(action, Backward | BackwardInput)]
    halves = [[a.microbatch for a in own if isinstance(a, kind)] for kind in (BackwardInput, BackwardWeight)]
    updates: list[list[int]] = [[]]  # none is left after the last step
    for action in own:
        if isinstance(action, Step):
            updates.append([])
        elif isinstance(action, Backward | BackwardWeight):
            updates[-1].append(action.microbatch)
    if forwards != backwards:
        raise ValueError(f"chunk {chunk}: backwards run in the order {backwards}, forwards {forwards}.")
    if halves[0] != halves[1]:
        raise ValueError(
            f"chunk {chunk}: second halves of backwards run in the order {halves[1]}, first halves {halves[0]}."
        )
    return forwards, backwards, [sorted(completed) for completed in updates]


def dependency_order(schedule: Schedule) -> Iterator[Action]:
    """All actions in an order in which the stages can run them: each after its predecessor in the stage's list and
    after what sends the message that it needs.

    Raises:
        ValueError: there is none: every unfinished stage waits for a message that is never sent.
    """
    chunks = len(placement(schedule))
    messages: set[Message | None] = {None}
    position = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for s, actions in enumerate(schedule):
            while position[s] < len(actions):
                action = actions[position[s]]
                if needed(action, chunks) not in messages:
                    break
                messages.add(sent(action, chunks))
                position[s] += 1
                progress = True
                yield action
    waiting = [
        f"stage {s}: {actions[i]} waits for the {message.kind} of microbatch {message.microbatch} over cut "
        f"{message.cut} | {message.cut + 1}"
        for s, (actions, i) in enumerate(zip(schedule, position, strict=True))
        if i < len(actions) and (message := needed(actions[i], chunks)) is not None
    ]
    if waiting:
        raise ValueError("The schedule deadlocks: " + "; ".join(waiting) + ".")
