"""A schedule worked out for many durations: what runs after what depends on the lists alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    Forward,
    Schedule,
    Step,
    placement,
)
from lightning_parallel.schedules.checks import dependency_order

FORWARD, BACKWARD, FIRST_HALF, SECOND_HALF = range(4)  # kinds of actions, as rows of tables by chunk
_KINDS = 4


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
    def by_stage(self) -> list[NDArray[np.intp]]:
        """For each stage, of its actions besides steps the kind and the chunk: an array of two rows."""
        found = []
        for actions in self.schedule:
            own = [action for action in actions if not isinstance(action, Step)]
            rows = [[_kind(action) for action in own], [action.chunk for action in own]]
            found.append(np.array(rows, dtype=np.intp))
        return found

    @cached_property
    def has_halves(self) -> bool:
        """Do backwards run in halves?"""
        return any(SECOND_HALF in kinds for kinds, _ in self.by_stage)

    @cached_property
    def _sources(self) -> list[tuple[int, int, int]]:
        """Of each action in order its stage, the index of its duration, and that of the action on another stage which
        it waits for; -1 if there is none."""
        chunks, found = len(self.places), []
        done: tuple[dict[tuple[int, int], int], ...] = ({}, {})  # forwards and backwards, by chunk and microbatch
        for index, action in enumerate(self.actions):
            if isinstance(action, Step):
                found.append((action.stage, _KINDS * chunks + action.stage, -1))
                continue
            kind, chunk, stage = _kind(action), action.chunk, self.places[action.chunk]
            source = -1
            if kind != SECOND_HALF:
                done[kind != FORWARD][chunk, action.microbatch] = index
                before = chunk + (-1 if kind == FORWARD else 1)
                # What comes from a chunk of the same stage is earlier in its list.
                if 0 <= before < chunks and self.places[before] != stage:
                    source = done[kind != FORWARD][before, action.microbatch]
            found.append((stage, kind * chunks + chunk, source))
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
        free = [0.0] * len(self.schedule)
        starts: list[float] = []
        updates: list[list[float]] = [[] for _ in self.schedule]
        for _ in range(batches):
            ends: list[float] = []
            for (stage, _, source), taken in zip(self._sources, durations, strict=True):
                start = free[stage]
                if source >= 0 and (there := ends[source] + latency) > start:
                    start = there
                free[stage] = end = start + taken
                starts.append(start)
                ends.append(end)
            for index, stage in self._steps:
                updates[stage].append(ends[index])
        return Clock(starts, updates)

    @cached_property
    def _steps(self) -> list[tuple[int, int]]:
        """The indices of the steps, with their stages."""
        return [(index, action.stage) for index, action in enumerate(self.actions) if isinstance(action, Step)]

    def busy(self, durations: Sequence[float]) -> list[float]:
        """The time of a batch in which each stage computes."""
        found = [0.0] * len(self.schedule)
        for (stage, *_), taken in zip(self._sources, durations, strict=True):
            found[stage] += taken
        return found


def _kind(action: Action) -> int:
    if isinstance(action, Forward):
        return FORWARD
    if isinstance(action, Backward):
        return BACKWARD
    return FIRST_HALF if isinstance(action, BackwardInput) else SECOND_HALF
