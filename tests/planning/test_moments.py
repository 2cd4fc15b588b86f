"""planning/moments.py: the messages that a schedule has on their way at one time."""

from __future__ import annotations

import pytest

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.moments import message_buffers
from lightning_parallel.planning.profile import ChunkCost


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
    chunks = [ChunkCost(1.0, 1.0, 0.5, 0, 0, 0, 0, sent=1) for _ in range(stages)]
    assert [message_buffers(choice, stage, chunks) for stage in range(stages)] == expected


def test_chunks_of_one_stage_need_no_buffers() -> None:
    choice = Choice("pipeline_zbv", 2, microbatches=4)
    chunks = [ChunkCost(1.0, 1.0, 0.5, 0, 0, 0, 0, sent=nbytes) for nbytes in (0, 1, 0, 0)]
    assert [message_buffers(choice, stage, chunks) for stage in range(2)] == [0, 0]
