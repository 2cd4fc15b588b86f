"""The schedules that have a name, those of one update and those without an end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import Schedule
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.asynchronous_v import AsyncV
from lightning_parallel.schedules.generators import Generator, gpipe, interleaved, naive, one_f_one_b, refuse_below
from lightning_parallel.schedules.v_shaped import vhalf, vmin, zbv

SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
    }
)

Endless: TypeAlias = Literal["1f1b", "vhalf", "vmin"]
TITLES: Mapping[Endless, str] = MappingProxyType({"1f1b": "1F1B", "vhalf": "V-Half", "vmin": "V-Min"})


def endless(schedule: Endless, stages: int, stage: int, extra_in_flight: int = 0) -> AsyncOneFOneB | AsyncV:
    """The endless list of one stage. One stage alone has one chunk, whatever the schedule."""
    if schedule == "1f1b" or stages == 1:
        return AsyncOneFOneB(stages, stage, extra_in_flight)
    return AsyncV(stages, stage, schedule)


def placement_of(schedule: Endless, stages: int) -> Placement:
    """The stage of each chunk of an endless schedule."""
    up = range(stages)
    return tuple(up if schedule == "1f1b" or stages == 1 else [*reversed(up), *up])


def asynchronous(
    stages: int, microbatches: int, updates: int, extra_in_flight: int = 0, schedule: Endless = "1f1b"
) -> Schedule:
    """`updates` updates of `microbatches` each by an endless schedule, then the drain."""
    refuse_below(1, stages=stages, microbatches=microbatches, updates=updates)
    lists = [endless(schedule, stages, stage, extra_in_flight) for stage in range(stages)]
    fed = [[action for _ in range(updates) for action in each.feed(microbatches)] for each in lists]
    return [[*actions, *each.drain()] for actions, each in zip(fed, lists, strict=True)]
