"""Pipeline schedules: for each stage, the list of what it computes, in order.

A schedule is data. The generators here are pure functions of a few integers; the same lists are checked
(`validate`), simulated and drawn (`simulate.py`), and run (`engine.py`). Messages are implied: the forward of
a microbatch on stage s needs the activation that its forward on stage s - 1 sent, its backward needs the
gradient that its backward on stage s + 1 sent.

In the clock tables below time runs to the right, a row is a stage, `F2` is the forward and `B2` the backward
of microbatch 2 (both drawn one clock long), `.` is a clock without work and `|` the optimizer step.

`python -m lightning_parallel.pipeline 1f1b --stages 4 --microbatches 8` draws one for other sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Forward:
    """Run this stage's layers on a microbatch; its activations are held until its `Backward`."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a microbatch; its gradients add to those of the update under way."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Update this stage's parameters with the gradients of the backwards since its last `Step`."""

    stage: int
    update: int


Action: TypeAlias = Forward | Backward | Step
Schedule: TypeAlias = list[list[Action]]  # the index is the stage


def naive(stages: int, microbatches: int = 1) -> Schedule:
    """One microbatch at a time: forward through all stages, backward through all stages, then the next.

    Holds the activations of one microbatch; all stages but one wait at any time, whatever `microbatches`.

    3 stages, 2 microbatches:

        stage 0 | F0  .  .  .  . B0 F1  .  .  .  . B1|
        stage 1 |  . F0  .  . B0  .  . F1  .  . B1| .
        stage 2 |  .  . F0 B0  .  .  .  . F1 B1| .  .
    """
    _check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        actions: list[Action] = []
        for k in range(microbatches):
            actions += [Forward(s, k), Backward(s, k)]
        schedule.append([*actions, Step(s, 0)])
    return schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (arXiv:1811.06965): the forwards of all microbatches, then the backwards of all microbatches.

    Every stage holds `microbatches` activations when it turns round. The backwards run in the order of the
    forwards (not reversed), so gradients are summed in the same order as by `one_f_one_b` and by a loop over
    the microbatches.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3|
        stage 1 |  . F0 F1 F2 F3  .  . B0 B1 B2 B3| .
        stage 2 |  .  . F0 F1 F2 F3 B0 B1 B2 B3| .  .
    """
    _check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        forwards: list[Action] = [Forward(s, k) for k in range(microbatches)]
        backwards: list[Action] = [Backward(s, k) for k in range(microbatches)]
        schedule.append([*forwards, *backwards, Step(s, 0)])
    return schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush (PipeDream-Flush, DAPPLE): each backward as early as it can run.

    Stage s starts with stages - 1 - s warm-up forwards, then alternates one forward and one backward, then
    runs the backwards still owed. Bubble and gradients are those of `gpipe`; stage s holds min(stages - s,
    microbatches) activations in place of `microbatches`. With fewer microbatches than stages the early stages
    have no steady phase.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3|
        stage 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3| .
        stage 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3| .  .
    """
    _check_sizes(stages, microbatches)
    schedule: Schedule = []
    for s in range(stages):
        warmup = min(stages - 1 - s, microbatches)
        actions: list[Action] = [Forward(s, k) for k in range(warmup)]
        for k in range(warmup, microbatches):
            actions += [Forward(s, k), Backward(s, k - warmup)]
        actions += [Backward(s, k) for k in range(microbatches - warmup, microbatches)]
        schedule.append([*actions, Step(s, 0)])
    return schedule


SYNCHRONOUS: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
)


class AsyncOneFOneB:
    """Asynchronous 1F1B (PipeDream, SOSP 2019): the endless list of one stage, produced slice by slice.

    As `one_f_one_b`, but never flushed: a stage steps as soon as the backwards of an update are done, and
    goes on with the next forward. After the fill no stage waits for the others.

    3 stages, updates of 1 microbatch, as `asynchronous(3, 1, updates=6)` draws it, drain included:

        stage 0 | F0 F1 F2  .  . B0|F3 B1|F4 B2|F5 B3| . B4| . B5|
        stage 1 |  . F0 F1  . B0|F2 B1|F3 B2|F4 B3|F5 B4| . B5| .
        stage 2 |  .  . F0 B0|F1 B1|F2 B2|F3 B3|F4 B4|F5 B5| .  .

    **Staleness.** Let w = `warmup` of the stage and m the microbatches of each update, without drains.
    Forward k runs after backwards 0 .. k-w-1, so it uses the weights after `version` = max(0, floor((k - w) /
    m)) updates; backward k runs after floor(k / m) updates. The difference is the staleness tau of microbatch
    k: once the pipeline is full (k >= w) the floor or the ceiling of w / m, and w / m in the mean over the
    microbatches of an update. In the fill (k < w) it is floor(k / m), since every forward uses the initial
    weights. So with no more in flight than needed, tau_s = stages - 1 - s for m = 1, at most 1 for m >=
    stages - 1, and 0 on the last stage always.

    **In flight.** Stage s holds w + 1 activations: stages - s. With no more than that, each message waits on
    the other side's compute, and message latency is paid in idle time. `extra_in_flight` warm-up forwards
    more on every link between neighbours buy it back at the price of staleness: w = (stages - 1 - s) * (1 +
    extra_in_flight). On fewer links it would not do, since any pair of neighbours without slack holds up all
    others. With equal forward time f, backward time b and message latency l on p stages, a microbatch takes

        max(f + b, (p (f + b) + 2 (p - 1) l) / (1 + (p - 1) (1 + extra_in_flight)))

    (the slowest loop of dependencies), which is f + b, no stage ever waiting, where 2 l <= extra_in_flight *
    (f + b).
    """

    def __init__(self, stages: int, stage: int, extra_in_flight: int = 0) -> None:
        self.warmup = _warmup(stages, stage, extra_in_flight)  # forwards that run ahead of the backwards
        self._stage = stage
        self._microbatch = 0  # number of the next forward
        self._update = 0  # number of the next step
        self._owed: deque[tuple[int, bool]] = deque()  # microbatches in flight: number, ends an update?

    @property
    def in_flight(self) -> int:
        """Microbatches whose backward is still owed."""
        return len(self._owed)

    def feed(self, count: int, *, ends_update: bool = True) -> Iterator[Action]:
        """The stage's actions upon the arrival of `count` new microbatches, numbered on from the last.

        The steps among them are those that fall due; up to `warmup` backwards, and their steps, stay owed to
        later calls or to `drain`. With `ends_update=False` (gradient accumulation) the update goes on with
        the next `feed`. The bookkeeping is complete on return, however much of the iterator is consumed.

        Raises:
            ValueError: `count` < 1.
        """
        if count < 1:
            raise ValueError(f"count={count}: feed at least one microbatch")
        actions: list[Action] = []
        for i in range(count):
            actions.append(Forward(self._stage, self._microbatch))
            self._owed.append((self._microbatch, ends_update and i == count - 1))
            self._microbatch += 1
            if len(self._owed) > self.warmup:
                actions += self._backward()
        return iter(actions)

    def drain(self) -> Iterator[Action]:
        """The backwards and steps still owed; the next `feed` refills, from the next microbatch number.

        An update left open by `ends_update=False` stays open: its backwards run, its step comes when it is
        complete.
        """
        actions: list[Action] = []
        while self._owed:
            actions += self._backward()
        return iter(actions)

    def _backward(self) -> Iterator[Action]:
        microbatch, ends_update = self._owed.popleft()
        yield Backward(self._stage, microbatch)
        if ends_update:
            yield Step(self._stage, self._update)
            self._update += 1


def asynchronous(stages: int, microbatches: int, updates: int, extra_in_flight: int = 0) -> Schedule:
    """`updates` updates of `microbatches` each by `AsyncOneFOneB`, then the drain: to check and to draw."""
    _check_sizes(stages, microbatches)
    if updates < 1:
        raise ValueError(f"updates={updates}: give at least one update")
    schedule: Schedule = []
    for s in range(stages):
        stage = AsyncOneFOneB(stages, s, extra_in_flight)
        actions: list[Action] = []
        for _ in range(updates):
            actions += stage.feed(microbatches)
        schedule.append([*actions, *stage.drain()])
    return schedule


def version(stages: int, stage: int, microbatches: int, microbatch: int, extra_in_flight: int = 0) -> int:
    """Updates that `stage` has done when the asynchronous schedule runs its forward of `microbatch`.

    For a steady number of `microbatches` per update and no drain so far; derived in `AsyncOneFOneB`.
    """
    _check_sizes(stages, microbatches)
    return max(0, (microbatch - _warmup(stages, stage, extra_in_flight)) // microbatches)


def _warmup(stages: int, stage: int, extra_in_flight: int) -> int:
    if not 0 <= stage < stages:
        raise ValueError(f"stage={stage}: with stages={stages} give a stage from 0 to {stages - 1}")
    if extra_in_flight < 0:
        raise ValueError(f"extra_in_flight={extra_in_flight}: give 0 or more microbatches")
    return (stages - 1 - stage) * (1 + extra_in_flight)


def _check_sizes(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise ValueError(f"stages={stages}: give at least one stage")
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: give at least one microbatch")


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run and counts every microbatch once.

    On every stage: each forward has one backward, after it; steps are numbered 0, 1, 2, ... and the backwards
    between two of them are the same microbatches on all stages, none left after the last. Between neighbours:
    messages are used in the order in which they are sent. Together: no stage waits for what will never come.

    Raises:
        ValueError: naming the stage and the action.
    """
    if not schedule:
        raise ValueError("the schedule has no stages")
    orders = [_validate_stage(s, actions) for s, actions in enumerate(schedule)]
    kinds = ("forward of microbatch", "backward of microbatch", "update by microbatches")
    for s in range(1, len(schedule)):
        for kind, here, before in zip(kinds, orders[s], orders[s - 1], strict=True):
            for mine, theirs in zip_longest(here, before, fillvalue="none"):
                if mine != theirs:
                    raise ValueError(f"stage {s}: {kind} {mine} comes where stage {s - 1} has {theirs}")
    for _ in dependency_order(schedule):
        pass


def _validate_stage(stage: int, actions: Sequence[Action]) -> tuple[Sequence[object], ...]:
    """What neighbours must agree on: orders of forwards and of backwards, microbatches of each update."""
    forwards: dict[int, Action] = {}
    backwards: dict[int, Action] = {}
    updates: list[list[int]] = []
    pending: list[int] = []  # backwards since the last step
    for action in actions:
        where = f"stage {stage}: {action}"
        if action.stage != stage:
            raise ValueError(f"{where} belongs to another stage")
        if isinstance(action, Step):
            if action.update != len(updates):
                raise ValueError(f"{where} comes where update {len(updates)} is due")
            if not pending:
                raise ValueError(f"{where} has no backward before it")
            updates.append(sorted(pending))
            pending.clear()
            continue
        done = forwards if isinstance(action, Forward) else backwards
        if action.microbatch in done:
            raise ValueError(f"{where} comes twice")
        if isinstance(action, Backward):
            if action.microbatch not in forwards:
                raise ValueError(f"{where} comes before its forward")
            pending.append(action.microbatch)
        done[action.microbatch] = action
    for microbatch, action in forwards.items():
        if microbatch not in backwards:
            raise ValueError(f"stage {stage}: {action} has no backward")
    if pending or not updates:
        raise ValueError(f"stage {stage}: after {actions[-1] if actions else 'no action'} a Step is missing")
    return list(forwards), list(backwards), updates


def source(action: Action, stages: int) -> Action | None:
    """The action on a neighbouring stage whose message `action` needs; None if it needs none."""
    if isinstance(action, Forward) and action.stage > 0:
        return Forward(action.stage - 1, action.microbatch)
    if isinstance(action, Backward) and action.stage < stages - 1:
        return Backward(action.stage + 1, action.microbatch)
    return None


def dependency_order(schedule: Schedule) -> Iterator[Action]:
    """All actions, in an order in which the stages can run them: each after its predecessor and its `source`.

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
        raise ValueError("the schedule deadlocks: " + "; ".join(waiting))
