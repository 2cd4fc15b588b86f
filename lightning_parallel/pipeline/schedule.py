"""Pipeline schedules: for each stage, the list of what it computes, in order.

A schedule is data. The generators here are pure functions of two integers. The same lists are checked
(:func:`validate`), simulated and drawn (``simulate.py``), and run (``engine.py``). Messages are implied: the forward of
a microbatch on stage s needs the activation that its forward on stage s - 1 sent, and its backward needs the gradient
that its backward on stage s + 1 sent.

In the clock tables below time runs to the right and a row is a stage. ``F2`` is the forward and ``B2`` the backward of
microbatch 2, both drawn one clock long; ``.`` is a clock without work, and ``|`` the optimizer step.

``python -m lightning_parallel.pipeline 1f1b --stages 4 --microbatches 8`` draws one for other sizes.

A new schedule is one more generator. ``PipelineStrategy(schedule=...)`` takes it; listed in :data:`SCHEDULES`, it has a
name too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Forward:
    """Run this stage's layers on a microbatch. Its activations are held until its `Backward`."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a microbatch. Its gradients are added to those of the update under way."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Update this stage's parameters with the gradients of the backwards since its last `Step`."""

    stage: int
    update: int


Action: TypeAlias = Forward | Backward | Step
Schedule: TypeAlias = list[list[Action]]  # the index is the stage
Generator: TypeAlias = Callable[[int, int], Schedule]  # of a number of stages and a number of microbatches


# -- generators --------------------------------------------------------------------------------------------------


def naive(stages: int, microbatches: int = 1) -> Schedule:
    """One microbatch at a time: forward through all stages, backward through all stages, then the next.

    It holds the activations of one microbatch. At any time all stages but one wait, whatever `microbatches` is.

    3 stages, 2 microbatches:

        stage 0 | F0  .  .  .  . B0 F1  .  .  .  . B1|
        stage 1 |  . F0  .  . B0  .  . F1  .  . B1| .
        stage 2 |  .  . F0 B0  .  .  .  . F1 B1| .  .

    Raises:
        ValueError: a number is less than one.
    """
    check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        actions: list[Action] = []
        for k in range(microbatches):
            actions += [Forward(s, k), Backward(s, k)]
        schedule.append([*actions, Step(s, 0)])
    return schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (arXiv:1811.06965): the forwards of all microbatches, then the backwards of all microbatches.

    Every stage holds the activations of all microbatches when its last forward is done. The backwards run in the order
    of the forwards (not reversed), so gradients are summed in the same order as by `one_f_one_b` and by a loop over the
    microbatches.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3|
        stage 1 |  . F0 F1 F2 F3  .  . B0 B1 B2 B3| .
        stage 2 |  .  . F0 F1 F2 F3 B0 B1 B2 B3| .  .

    Raises:
        ValueError: a number is less than one.
    """
    check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        forwards: list[Action] = [Forward(s, k) for k in range(microbatches)]
        backwards: list[Action] = [Backward(s, k) for k in range(microbatches)]
        schedule.append([*forwards, *backwards, Step(s, 0)])
    return schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush (PipeDream-Flush, DAPPLE): each backward as early as it can run.

    Stage s starts with stages - 1 - s warm-up forwards. Then one forward and one backward alternate, and at the end the
    remaining backwards run. Bubble and gradients are those of `gpipe`. Stage s holds min(stages - s, microbatches)
    activations in place of `microbatches`. With fewer microbatches than stages the early stages have no steady phase.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3|
        stage 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3| .
        stage 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3| .  .

    Raises:
        ValueError: a number is less than one.
    """
    check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        warmup = min(stages - 1 - s, microbatches)
        actions: list[Action] = [Forward(s, k) for k in range(warmup)]  # warm-up
        for k in range(warmup, microbatches):  # steady state
            actions += [Forward(s, k), Backward(s, k - warmup)]
        actions += [Backward(s, k) for k in range(microbatches - warmup, microbatches)]  # cool-down
        schedule.append([*actions, Step(s, 0)])
    return schedule


SCHEDULES: Mapping[str, Generator] = MappingProxyType({"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b})


def check_sizes(stages: int, microbatches: int) -> None:
    """Refuse sizes below one."""
    if stages < 1:
        raise ValueError(f"stages={stages}: give at least one stage.")
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: give at least one microbatch.")


# -- checks ------------------------------------------------------------------------------------------------------


def of_one_update(generator: Generator, stages: int, microbatches: int) -> Schedule:
    """The lists that a generator makes, checked: each microbatch once, in order, and one step at the end.

    Raises:
        ValueError: it names the generator, and what is wrong with its lists.
    """
    name = getattr(generator, "__name__", repr(generator))
    try:
        made = generator(stages, microbatches)
        if len(made) != stages:
            raise ValueError(f"there are {len(made)} lists for {stages} stages.")
        validate(made)
        for stage, actions in enumerate(made):
            forwards = [action.microbatch for action in actions if isinstance(action, Forward)]
            if forwards != list(range(microbatches)):
                raise ValueError(
                    f"stage {stage}: the forwards are of {forwards}, not of microbatches 0 to {microbatches - 1} in "
                    f"this order."
                )
            if sum(isinstance(action, Step) for action in actions) != 1 or not isinstance(actions[-1], Step):
                raise ValueError(f"stage {stage}: an update has one Step, at its end.")
    except ValueError as error:
        raise ValueError(f"schedule={name}, {stages} stages, {microbatches} microbatches: {error}") from None
    return made


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run and counts every microbatch once.

    On every stage, each forward has one backward, and backwards run in the order of the forwards. Steps are numbered 0,
    1, 2, ...; the backwards between two of them are the same microbatches on all stages, and none is left after the
    last. Between neighbours, messages are used in the order in which they are sent. Together, no stage waits for what
    will never come.

    Raises:
        ValueError: it names the stage and the action.
    """
    if not schedule:
        raise ValueError("The schedule has no stages.")
    orders = [_validate_stage(s, actions) for s, actions in enumerate(schedule)]
    kinds = ("forward of microbatch", "backward of microbatch", "update by microbatches")
    for s in range(1, len(schedule)):
        for kind, here, before in zip(kinds, orders[s], orders[s - 1], strict=True):
            for mine, theirs in zip_longest(here, before, fillvalue="none"):
                if mine != theirs:
                    raise ValueError(f"stage {s}: {kind} {mine} comes where stage {s - 1} has {theirs}.")
    for _ in dependency_order(schedule):
        pass


def _validate_stage(stage: int, actions: Sequence[Action]) -> tuple[Sequence[object], ...]:
    """What neighbours must agree on: the orders of forwards and of backwards, and the microbatches of each update."""
    forwards: dict[int, Action] = {}
    backwards: dict[int, Action] = {}
    updates: list[list[int]] = []
    pending: list[int] = []  # backwards since the last step
    for action in actions:
        where = f"stage {stage}: {action}"
        if action.stage != stage:
            raise ValueError(f"{where} belongs to another stage.")
        if isinstance(action, Step):
            if action.update != len(updates):
                raise ValueError(f"{where} comes where update {len(updates)} is due.")
            if not pending:
                raise ValueError(f"{where} has no backward before it.")
            updates.append(sorted(pending))
            pending.clear()
            continue
        done = forwards if isinstance(action, Forward) else backwards
        if action.microbatch in done:
            raise ValueError(f"{where} comes twice.")
        if isinstance(action, Backward):
            if action.microbatch not in forwards:
                raise ValueError(f"{where} comes before its forward.")
            pending.append(action.microbatch)
        done[action.microbatch] = action
    for microbatch, action in forwards.items():
        if microbatch not in backwards:
            raise ValueError(f"stage {stage}: {action} has no backward.")
    if list(forwards) != list(backwards):
        raise ValueError(f"stage {stage}: backwards run in the order {list(backwards)}, forwards {list(forwards)}.")
    if pending or not updates:
        raise ValueError(f"stage {stage}: after {actions[-1] if actions else 'no action'} a Step is missing.")
    return list(forwards), list(backwards), updates


def source(action: Action, stages: int) -> Action | None:
    """The action on a neighbouring stage whose message `action` needs; None if it needs none."""
    if isinstance(action, Forward) and action.stage > 0:
        return Forward(action.stage - 1, action.microbatch)
    if isinstance(action, Backward) and action.stage < stages - 1:
        return Backward(action.stage + 1, action.microbatch)
    return None


def dependency_order(schedule: Schedule) -> Iterator[Action]:
    """All actions in an order in which the stages can run them: each after its predecessor and its :func:`source`.

    Raises:
        ValueError: there is none: every unfinished stage waits for a message that is never sent.
    """
    done: set[Action] = set()
    position = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for s, actions in enumerate(schedule):
            while position[s] < len(actions):
                action = actions[position[s]]
                needed = source(action, len(schedule))
                if needed is not None and needed not in done:
                    break
                done.add(action)
                position[s] += 1
                progress = True
                yield action
    waiting = [
        f"stage {s}: {actions[i]} waits for {source(actions[i], len(schedule))}"
        for s, (actions, i) in enumerate(zip(schedule, position, strict=True))
        if i < len(actions)
    ]
    if waiting:
        raise ValueError("The schedule deadlocks: " + "; ".join(waiting) + ".")
