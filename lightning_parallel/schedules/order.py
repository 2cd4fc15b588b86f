"""A schedule worked out for many durations: what runs after what depends on the lists alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
_KINDS = (Forward, Backward, BackwardInput, BackwardWeight)  # of which each has a duration for each chunk


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
    def has_halves(self) -> bool:
        """Do backwards run in halves?"""
        return any(isinstance(action, BackwardInput) for action in self.actions)

    @cached_property
    def _sources(self) -> list[tuple[int, int, int]]:
        """Of each action in order its stage, the index of its duration, and that of the action on another stage which
        it waits for; -1 if there is none."""
        chunks, found = len(self.places), []
        senders: dict[Message | None, tuple[int, int]] = {}  # by what they send, the indices of actions, and stages
        for index, action in enumerate(self.actions):
            if isinstance(action, Step):
                found.append((action.stage, len(_KINDS) * chunks + action.stage, -1))
                continue
            stage = self.places[action.chunk]
            source, sender = senders.get(needed(action, chunks), (-1, stage))
            # What comes from a chunk of the same stage is earlier in its list.
            which = _KINDS.index(type(action)) * chunks + action.chunk
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
        steps = len(_KINDS) * len(self.places)
        free = [0.0] * len(self.schedule)
        starts: list[float] = []
        updates: list[list[float]] = [[] for _ in self.schedule]
        for _ in range(batches):
            ends: list[float] = []
            for (stage, which, source), taken in zip(self._sources, durations, strict=True):
                start = free[stage]
                if source >= 0 and (there := ends[source] + latency) > start:
                    start = there
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
