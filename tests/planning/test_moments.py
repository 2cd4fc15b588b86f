"""planning/moments.py: the messages that a schedule has on their way at one time."""

from __future__ import annotations

import pytest

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.moments import held_and_fullest, message_buffers


@pytest.mark.parametrize(
    ("strategy", "stages", "expected"),
    [
        # Sent: a microbatch's activation until its gradient comes, a gradient until an activation that was sent later.
        # And one of each kind is expected.
        ("gpipe", 2, [4 + 1, 4 + 1]),
        ("1f1b", 2, [2 + 1, 3 + 1]),
        ("1f1b", 3, [3 + 1, (2 + 1) + (3 + 1), 3 + 1]),
    ],
)
def test_messages_that_a_stage_has_at_once(strategy: str, stages: int, expected: list[int]) -> None:
    choice = Choice(f"pipeline_{strategy}", stages, microbatches=4)
    chunks = [ChunkCost(1.0, 1.0, 0.5, 0, 0, 0, sent=1) for _ in range(stages)]
    assert [message_buffers(choice, stage, chunks) for stage in range(stages)] == expected


def test_chunks_of_one_stage_need_no_buffers() -> None:
    choice = Choice("pipeline_zbv", 2, microbatches=4)
    chunks = [ChunkCost(1.0, 1.0, 0.5, 0, 0, 0, sent=nbytes) for nbytes in (0, 1, 0, 0)]
    assert [message_buffers(choice, stage, chunks) for stage in range(2)] == [0, 0]


MIB = 2**20
HOLDS = [ChunkCost(1.0, 1.0, 0.5, 10 * MIB, 10 * MIB, 10 * MIB) for _ in range(4)]


def fullest(strategy: str, gradients: list[int], averaged: list[int], microbatches: int = 4) -> int:
    """On the last of two stages, in MiB."""
    choice = Choice(f"pipeline_{strategy}", 2, microbatches=microbatches)
    scaled = [[MIB * each for each in given] for given in (gradients, averaged)]
    return held_and_fullest(choice, 1, HOLDS, scaled[0], 0, averaged=scaled[1])[1] // MIB


def test_messages_of_a_chunk_that_ends_early_are_there_beside_activations() -> None:
    none = [0, 0, 0, 0]
    alone = fullest("interleaved", [0, 0, 0, 100], none)
    assert fullest("interleaved", [0, 0, 0, 100], [0, 0, 0, 100]) > alone
    # Less than a message is sent when all is complete, which is when nothing is held.
    assert fullest("interleaved", [0, 0, 0, 20], [0, 0, 0, 20]) == fullest("interleaved", [0, 0, 0, 20], none)
    assert fullest("interleaved", [0, 0, 0, 100], [0, 100, 0, 0]) >= 200  # at the end


def test_gradients_are_there_from_the_first_backward_that_makes_them() -> None:
    none = [0, 0, 0, 0]
    early, late = [0, 200, 0, 0], [0, 0, 0, 200]  # of chunks whose backwards end, and begin, the batch
    assert fullest("interleaved", late, none, 2) > fullest("interleaved", early, none, 2)
