"""What a plan computes by formulas: NCCL's buffers, messages on their way, and the time of a step by those of its
chunks."""

from __future__ import annotations

import pytest

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.costs.devices import Device
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.communicators import nccl_buffers
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.moments import held_and_fullest, message_buffers
from lightning_parallel.planning.step_time import OF_BATCH, OF_FORWARD, OF_PIPELINE, OF_TURN, StepTime, of_step

MIB = 2**20
UNTIED = Partition(owners={}, uses={}, aliases={})
TIED = Partition(owners={"shared": (0, 3)}, uses={}, aliases={"shared": "shared"})
IN_A_ROW = [1, 2, 2, 1]


@pytest.mark.parametrize(("choice", "parts", "groups", "cuts"), [
    (Choice("single"), UNTIED, [0], [0]),
    (Choice("ddp", data=2), UNTIED, [1], [0]),  # Lightning's: the world alone
    (Choice("fully_sharded", data=2), UNTIED, [2], [0]),  # the world, and replicas
    (Choice("tensor_parallel", data=2, tensor=4), UNTIED, [3], [0]),  # the world, shards, replicas
    (Choice("pipeline_1f1b", 4, microbatches=4), UNTIED, [2] * 4, IN_A_ROW),  # the world, stages
    (Choice("pipeline_1f1b", 4, microbatches=4), TIED, [3, 2, 2, 3], IN_A_ROW),
    (Choice("pipeline_1f1b", 4, data=2, tensor=2, microbatches=4), UNTIED, [5] * 4, IN_A_ROW),  # and the model
    (Choice("pipeline_interleaved", 4, microbatches=4), UNTIED, [2] * 4, [3, 4, 4, 3]),
    (Choice("pipeline_zbv", 4, microbatches=4), UNTIED, [2] * 4, [2, 4, 4, 2]),  # the last one's are neighbours
], ids=str)  # fmt: skip
def test_groups_and_cuts_have_communicators(
    choice: Choice, parts: Partition, groups: list[int], cuts: list[int]
) -> None:
    for stage, (joined, crossed) in enumerate(zip(groups, cuts, strict=True)):
        assert nccl_buffers(choice, stage, parts, (24, 0)) == joined * 576 * MIB
        assert nccl_buffers(choice, stage, parts, (0, 32)) == crossed * 384 * MIB
        assert nccl_buffers(choice, stage, parts, (0, 0)) == 0


# -- messages that a schedule has on their way at one time ----------------------------------------------------------


@pytest.mark.parametrize(("strategy", "sent", "expected"), [
    # Sent: a microbatch's activation until its gradient comes, a gradient until an activation that was sent later.
    # And one of each kind is expected.
    ("gpipe", [1, 1], [4 + 1, 4 + 1]), ("1f1b", [1, 1, 1], [3 + 1, (2 + 1) + (3 + 1), 3 + 1]),
    ("zbv", [0, 1, 0, 0], [0, 0]),  # from one chunk of a stage to the next
])  # fmt: skip
def test_messages_that_a_stage_has_at_once(strategy: str, sent: list[int], expected: list[int]) -> None:
    choice = Choice(f"pipeline_{strategy}", len(expected), microbatches=4)
    chunks = [ChunkCost(1.0, 1.0, 0.5, 0, 0, 0, sent=nbytes) for nbytes in sent]
    assert [message_buffers(choice, stage, chunks) for stage in range(len(expected))] == expected


HOLDS = [ChunkCost(1.0, 1.0, 0.5, 10 * MIB, 10 * MIB, 10 * MIB) for _ in range(4)]


def fullest(strategy: str, gradients: list[int], averaged: list[int], microbatches: int = 4) -> int:
    """On the last of two stages, in MiB."""
    choice = Choice(f"pipeline_{strategy}", 2, microbatches=microbatches)
    scaled = [[MIB * each for each in given] for given in (gradients, averaged)]
    return held_and_fullest(choice, 1, HOLDS, scaled[0], 0, averaged=scaled[1])[1] // MIB


def test_gradients_and_their_messages_are_there_beside_activations_from_the_first_backward_that_makes_them() -> None:
    none = [0, 0, 0, 0]
    alone = fullest("interleaved", [0, 0, 0, 100], none)
    assert fullest("interleaved", [0, 0, 0, 100], [0, 0, 0, 100]) > alone
    # Less than a message is sent when all is complete, which is when nothing is held.
    assert fullest("interleaved", [0, 0, 0, 20], [0, 0, 0, 20]) == fullest("interleaved", [0, 0, 0, 20], none)
    assert fullest("interleaved", [0, 0, 0, 100], [0, 100, 0, 0]) >= 200  # at the end
    early, late = [0, 200, 0, 0], [0, 0, 0, 200]  # of chunks whose backwards end, and begin, the batch
    assert fullest("interleaved", late, none, 2) > fullest("interleaved", early, none, 2)


# -- the time of a step ---------------------------------------------------------------------------------------------

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
