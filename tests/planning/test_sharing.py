"""Stages that share cores, on paper."""

from __future__ import annotations

import pytest

from lightning_parallel.costs.devices import Device
from lightning_parallel.planning.sharing import simulate_shared
from lightning_parallel.schedules.named import SCHEDULES
from lightning_parallel.schedules.simulate import Simulation, repeated, simulate

KNOWN = ("gpipe", "1f1b", "interleaved", "zbv")


def shared(schedule: str, *, at_once: int, batches: int = 1) -> Simulation:
    lists = repeated(SCHEDULES[schedule](4, 8), batches)
    device = Device("a CPU", 1.0, 1.0, 1.0, 0.0, 0.0, at_once=at_once)
    chunks = 8 if schedule in ("interleaved", "zbv") else 4
    return simulate_shared(lists, [1.0] * chunks, [2.0] * chunks, [0.5] * 4, 0.25, [0.5] * chunks, device.speed)


@pytest.mark.parametrize("schedule", KNOWN)
def test_with_a_core_for_each_it_is_the_simulation(schedule: str) -> None:
    known = simulate(repeated(SCHEDULES[schedule](4, 8), 2), 1.0, 2.0, 0.5, 0.25, 0.5)
    found = shared(schedule, at_once=4, batches=2)
    for row, right in zip(found.rows, known.rows, strict=True):
        assert [timed.action for timed in row] == [timed.action for timed in right]
        assert [timed.end for timed in row] == pytest.approx([timed.end for timed in right])


@pytest.mark.parametrize("schedule", KNOWN)
def test_one_core_does_the_work_of_all(schedule: str) -> None:
    work = sum(simulate(SCHEDULES[schedule](4, 8), 1.0, 2.0, 0.5, 0.0, 0.5).busy)
    assert shared(schedule, at_once=1).makespan == pytest.approx(work, rel=0.05)  # and some messages
    assert work / 2 < shared(schedule, at_once=2).makespan < work
