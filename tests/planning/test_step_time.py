"""planning/step_time.py: the time of a step by those of its chunks."""

from __future__ import annotations

import pytest

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.costs.devices import Device
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.step_time import OF_BATCH, OF_FORWARD, OF_PIPELINE, OF_TURN, StepTime, of_step

STAGES, MICROBATCHES = 4, 8


def of(schedule: str, cores: int) -> StepTime:
    """A stage's forwards take 10 ms, its backwards 20; messages take no time."""
    choice = Choice(f"pipeline_{schedule}", STAGES, microbatches=MICROBATCHES)
    chunks = len(choice.placement)
    each = ChunkCost(0.04 / chunks, 0.08 / chunks, 0.5, 0, 0, 0)
    parts = Partition(owners={}, uses={}, aliases={}, placement=choice.placement)
    device = Device("a CPU", 1e9, 1e9, 1e9, 0.0, 0.0, overlaps=False, at_once=cores)
    return of_step(choice, device, parts, [each] * chunks, [Memory()] * STAGES, [0.0] * STAGES, waits=True)


@pytest.mark.parametrize(("schedule", "chunks", "actions"), [("gpipe", 1, 2), ("interleaved", 2, 2), ("zbv", 2, 3)])
def test_ranks_that_share_a_core_take_turns(schedule: str, chunks: int, actions: int) -> None:
    of_chunk = OF_FORWARD + actions * OF_TURN
    of_stage = MICROBATCHES * (0.03 + chunks * of_chunk)
    shared = of(schedule, 1)
    assert shared.total == pytest.approx(STAGES * of_stage + OF_BATCH + OF_PIPELINE, rel=0.02)
    assert shared.overhead == pytest.approx(MICROBATCHES * chunks * of_chunk + OF_BATCH + OF_PIPELINE)
    own = of(schedule, STAGES)
    assert own.overhead == pytest.approx(MICROBATCHES * chunks * OF_FORWARD + OF_BATCH + OF_PIPELINE)
