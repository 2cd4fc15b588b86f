"""What ranks wish holds on all of them from the same batch on, and none gets too far ahead."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_parallel.ranks.notice import store_of_run
from lightning_parallel.ranks.vote import Vote
from tools.workers.pool import WorkerPool

AHEAD, BATCHES = 2, 9
# By rank, what it wishes after which batches; and the batch after which each wish holds.
WISHES: list[tuple[dict[int, dict[int, int]], list[int]]] = [
    ({}, [BATCHES, BATCHES]),
    ({0: {0: 3}, 1: {0: 3}, 2: {0: 3}}, [3, BATCHES]),
    ({1: {0: 3}}, [3 + AHEAD + 1, BATCHES]),
    ({0: {0: 4}, 1: {0: 4}, 2: {0: 3}}, [3 + AHEAD + 1, BATCHES]),
    ({0: {1: 1}, 1: {0: 5}, 2: {1: 2, 0: 5}}, [5 + AHEAD + 1, 1 + AHEAD + 1]),
]


def votes(slow: int) -> list[tuple[list[list[bool]], list[float]]]:
    """For each of the wishes what holds after each batch on this rank, and when it has ended each. One rank ends its
    first batch when rank 1 is as far ahead as it may be."""
    rank, found = dist.get_rank(), []
    for wishes, _ in WISHES:
        held, reached, ended, seen = Vote(2, AHEAD), store_of_run("reached"), list[float](), []
        for batch in range(BATCHES):
            if rank == slow and batch == 0:
                reached.wait(["here"], timedelta(seconds=30))
                time.sleep(0.02)  # in which it must not go on
            ended.append(time.monotonic())
            if rank == 1 and batch == AHEAD + 1:
                reached.set("here", "")
            seen.append(held.after_batch(*(wishes.get(rank, {}).get(wish, BATCHES) <= batch for wish in range(2))))
        found.append((seen, ended))
    return found


@pytest.mark.parametrize("slow", [0, 2])
def test_a_wish_holds_on_all_ranks_from_the_same_batch_on_and_none_gets_further_ahead(
    pool: WorkerPool, slow: int
) -> None:
    for (_, first), *ranks in zip(WISHES, *pool.run(votes, 3, slow), strict=True):
        assert [seen for seen, _ in ranks] == [[[batch >= each for each in first] for batch in range(BATCHES)]] * 3
        ended = [times for _, times in ranks]
        assert ended[slow][0] < ended[1][AHEAD + 2]
