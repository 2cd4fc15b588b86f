"""Computes what a schedule costs, without any process: time, waiting, activations held.

What runs after what depends on the lists alone. So an :class:`Order` serves many durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Schedule,
    Step,
    needed,
    placement,
    sent,
)
from lightning_parallel.schedules.checks import dependency_order

BATCHES, _FILL = 5, 2  # batches of stages that don't wait for each other, and those until the period is steady
_TIMED = (Forward, Backward, BackwardInput, BackwardWeight)  # in the order of the table in `Order.durations`


@dataclass(frozen=True)
class Clock:
    """When the actions of some batches begin.

    Attributes:
        starts: of the actions of all batches, each batch in order.
        updates: for each stage, when its steps end.
    """

    starts: Sequence[float]
    updates: Sequence[Sequence[float]]

    @property
    def makespan(self) -> float:
        """The time at which the last stage is done."""
        return max(updates[-1] for updates in self.updates)

    @property
    def period(self) -> float:
        """The time from an update to the next one, once it is steady; of a single batch, all."""
        ends = self.updates[-1]
        return self.makespan if len(ends) == 1 else (ends[-1] - ends[_FILL - 1]) / (len(ends) - _FILL)


class Order:
    """A schedule with its actions in an order in which they can run.

    Attributes:
        schedule: its lists.
        places: the stage of each chunk.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places = placement(schedule)

    @cached_property
    def actions(self) -> list[Action]:
        """The actions of all stages, in order. ValueError: the schedule deadlocks."""
        return [*dependency_order(self.schedule)]

    @cached_property
    def _sources(self) -> list[tuple[int, int, int]]:
        """Of each action in order its stage, the index of its duration, and that of the action on another stage which
        it waits for; -1 if there is none."""
        chunks, found = len(self.places), []
        senders: dict[Message | None, tuple[int, int]] = {}  # by what they send, the indices of actions, and stages
        for index, action in enumerate(self.actions):
            if isinstance(action, Step):
                found.append((action.stage, len(_TIMED) * chunks + action.stage, -1))
                continue
            stage = self.places[action.chunk]
            source, sender = senders.get(needed(action, chunks), (-1, stage))
            # What comes from a chunk of the same stage is earlier in its list.
            which = _TIMED.index(type(action)) * chunks + action.chunk
            found.append((stage, which, -1 if sender == stage else source))
            if (message := sent(action, chunks)) is not None:
                senders[message] = index, stage
        return found

    def durations(
        self, forward: Sequence[float], backward: Sequence[float], step: Sequence[float], first: Sequence[float]
    ) -> list[float]:
        """Of each action in order, by the durations of chunks, and of the stages' updates. ``first``: the part of a
        backward that is in its first half."""
        halves = [*zip(backward, first, strict=True)]
        table = [*forward, *backward, *(b * part for b, part in halves), *(b * (1 - part) for b, part in halves), *step]
        return [table[which] for _, which, _ in self._sources]

    @cached_property
    def equal(self) -> list[float]:
        """The durations with equal chunks, backwards of twice the forwards, and updates that take no time."""
        chunks, stages = len(self.places), len(self.schedule)
        return self.durations([1.0] * chunks, [2.0] * chunks, [0.0] * stages, [0.5] * chunks)

    def run(self, durations: Sequence[float], latency: float, batches: int = 1) -> Clock:
        """Every action starts as soon as its stage is free and its message is there, and a stage goes on to the next
        batch as soon as its own update is done.

        Args:
            durations: of each action in order.
            latency: from the end of an action until another stage can use its message.
        """
        steps = len(_TIMED) * len(self.places)
        free = [0.0] * len(self.schedule)
        starts: list[float] = []
        updates: list[list[float]] = [[] for _ in self.schedule]
        for _ in range(batches):
            ends: list[float] = []
            for (stage, which, source), taken in zip(self._sources, durations, strict=True):
                start = max(free[stage], ends[source] + latency) if source >= 0 else free[stage]
                free[stage] = end = start + taken
                starts.append(start)
                ends.append(end)
                if which >= steps:
                    updates[stage].append(end)
        return Clock(starts, updates)

    def busy(self, durations: Sequence[float]) -> list[float]:
        """The time of a batch in which each stage computes."""
        found = [0.0] * len(self.schedule)
        for (stage, *_), taken in zip(self._sources, durations, strict=True):
            found[stage] += taken
        return found


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and the times at which it runs, in the unit of the durations given to `simulate`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule with the times of its actions. The first one starts at 0.

    Attributes:
        rows: a list for each stage, in the order of the schedule.
    """

    rows: list[list[Timed]]

    @property
    def makespan(self) -> float:
        """The time at which the last stage is done."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy(self) -> list[float]:
        """The time in which each stage computes (forwards, backwards and steps)."""
        return [sum(timed.end - timed.start for timed in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """The fraction of stages x makespan in which a stage waits, fill and drain included."""
        return 1 - sum(self.busy) / (len(self.rows) * self.makespan)


def most_held(actions: Iterable[Action], sizes: Sequence[int], between: Sequence[int] | None) -> int:
    """The most that a stage holds at once, from forwards to the ends of their backwards.

    Args:
        sizes: what each chunk holds of a microbatch up to its backward, in any unit.
        between: what each chunk holds of a microbatch between the two halves of its backward; None if second halves run
            with the first.
    """
    waiting = [0] * len(sizes) if between is None else between
    held = most = 0
    for action in actions:
        if isinstance(action, Step):
            continue
        if isinstance(action, Forward):
            held += sizes[action.chunk]
        elif isinstance(action, Backward):
            held -= sizes[action.chunk]
        elif isinstance(action, BackwardInput):
            held += waiting[action.chunk] - sizes[action.chunk]
        elif isinstance(action, BackwardWeight):
            held -= waiting[action.chunk]
        else:
            assert_never(action)
        most = max(most, held)
    return most


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    step: float | Sequence[float] = 0.0,
    latency: float = 0.0,
    first: float | Sequence[float] = 0.5,
) -> Simulation:
    """Run a schedule on paper: every action starts as soon as its stage is free and its message is there. By default
    chunks are equal, backwards take twice as long as forwards, and messages no time, which gives the bubble by theory.

    Args:
        schedule: a list of actions for each stage.
        forward: the duration of a chunk's forward, for all chunks or for each, in any unit of time.
        backward: the duration of a chunk's whole backward, in the same unit.
        step: the duration of an update, for all stages or for each, in the same unit.
        latency: the time from the end of an action until another stage can use its message. Messages overlap with
            computing and with each other.
        first: the part of a backward that is in its first half, for all chunks or for each.

    Raises:
        ValueError: a duration is not positive (`step`, `latency`: negative), there is a wrong number of them, or the
            schedule deadlocks.
    """
    order = Order(schedule)
    chunks = len(order.places)
    forwards = _durations("forward", forward, chunks, "chunks")
    backwards = _durations("backward", backward, chunks, "chunks")
    steps = _durations("step", step, len(schedule), "stages", allow_zero=True)
    if latency < 0:
        raise ValueError(f"latency={latency}: give 0 or more.")
    firsts = _durations("first", first, chunks, "chunks", allow_zero=True)
    durations = order.durations(forwards, backwards, steps, firsts)
    rows: list[list[Timed]] = [[] for _ in schedule]
    for action, start, taken in zip(order.actions, order.run(durations, latency).starts, durations, strict=True):
        stage = action.stage if isinstance(action, Step) else order.places[action.chunk]
        rows[stage].append(Timed(action, start, start + taken))
    return Simulation(rows)


def _durations(
    name: str, value: float | Sequence[float], count: int, of: str, *, allow_zero: bool = False
) -> Sequence[float]:
    values = [float(value)] * count if isinstance(value, (int, float)) else value
    if len(values) != count:
        raise ValueError(f"{name}={value}: give one number, or one for each of the {count} {of}.")
    if any(v < 0 or (v == 0 and not allow_zero) for v in values):
        raise ValueError(f"{name}={value}: durations must be {'0 or more' if allow_zero else 'above 0'}.")
    return values


def busy_across_batches(schedule: Schedule, latency: float = 0.0) -> float:
    """The fraction of the stages' time in which they compute if none waits for the others between batches, for equal
    chunks and backwards of twice the forwards. `latency` is in forwards of a chunk."""
    order = Order(schedule)
    return sum(order.busy(order.equal)) / (len(schedule) * order.run(order.equal, latency, BATCHES).period)
