"""What ranks wish holds on all of them from the same batch on, and none gets too far ahead."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_parallel.ranks.vote import Vote
from tools.workers.pool import WorkerPool

AHEAD, BATCHES = 2, 9


def vote(wishes: dict[int, dict[int, int]], slow: int) -> tuple[list[list[bool]], list[float]]:
    """What holds after each batch on this rank, and when it has ended each.

    Args:
        wishes: by rank, what it wishes after which batches.
        slow: a rank whose first batch takes a while.
    """
    rank = dist.get_rank()
    held, ended = Vote(2, AHEAD), list[float]()
    seen = []
    for batch in range(BATCHES):
        if rank == slow and batch == 0:
            time.sleep(0.5)
        ended.append(time.monotonic())
        seen.append(held.after_batch(*(wishes.get(rank, {}).get(wish, BATCHES) <= batch for wish in range(2))))
    return seen, ended


@pytest.mark.parametrize(("wishes", "first", "second"), [
    ({}, BATCHES, BATCHES),
    ({0: {0: 3}, 1: {0: 3}, 2: {0: 3}}, 3, BATCHES),
    ({1: {0: 3}}, 3 + AHEAD + 1, BATCHES),
    ({0: {0: 4}, 1: {0: 4}, 2: {0: 3}}, 3 + AHEAD + 1, BATCHES),
    ({0: {1: 1}, 1: {0: 5}, 2: {1: 2, 0: 5}}, 5 + AHEAD + 1, 1 + AHEAD + 1),
])  # fmt: skip
@pytest.mark.parametrize("slow", [0, 2])
def test_a_wish_holds_on_all_ranks_from_the_same_batch_on(
    pool: WorkerPool, wishes: dict[int, dict[int, int]], first: int, second: int, slow: int
) -> None:
    expected = [[batch >= first, batch >= second] for batch in range(BATCHES)]
    assert [seen for seen, _ in pool.run(vote, 3, wishes, slow)] == [expected] * 3


def test_no_rank_gets_further_ahead_than_the_count_that_it_needs(pool: WorkerPool) -> None:
    ended = [ended for _, ended in pool.run(vote, 3, {}, 1)]
    assert ended[0][AHEAD + 1] < ended[1][0] < ended[0][AHEAD + 2]
