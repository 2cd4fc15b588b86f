"""All ranks hear the highest number that one of them has, on the host, in one ring or along rows and columns."""

from __future__ import annotations

import math
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_parallel.ranks import meeting
from lightning_parallel.ranks.meeting import Meeting, row_and_column
from tools.workers.pool import WorkerPool


def highest_on_the_host() -> list[int]:
    backend = dist.get_backend
    dist.get_backend = lambda *args: "nccl"
    try:
        made = Meeting(3, timedelta(seconds=20))
    finally:
        dist.get_backend = backend
    return made.highest(dist.get_rank())


def test_on_gpus_the_ranks_meet_on_the_host(pool: WorkerPool) -> None:
    assert pool.run(highest_on_the_host, 3) == [[2]] * 3


def highest_of_many(numbers: list[int]) -> list[list[int]]:
    with patch.object(meeting, "_IN_ONE_RING", 1):
        made = Meeting(len(numbers), timedelta(seconds=20))
        return [made.highest(numbers[(dist.get_rank() + turn) % len(numbers)], turn) for turn in range(3)]


@pytest.mark.parametrize("numbers", [[0, 1, 0, 0], [2, 0, 0], [0, 0, 0, 0]])
def test_many_ranks_ask_along_rows_and_columns(pool: WorkerPool, numbers: list[int]) -> None:
    found = pool.run(highest_of_many, len(numbers), numbers)
    assert found == [[[max(numbers), turn] for turn in range(3)]] * len(numbers)


@pytest.mark.parametrize(("ranks", "lengths"), [(1024, [32, 32]), (96, [8, 12]), (127, [127])])
def test_rows_and_columns_join_all_ranks(ranks: int, lengths: list[int]) -> None:
    for rank in (0, 77, ranks - 1):
        lines = row_and_column(rank, ranks, math.isqrt(ranks))
        assert [len(line) for line in lines] == lengths and all(rank in line for line in lines)
        heard = {other for one in lines[0] for other in row_and_column(one, ranks, math.isqrt(ranks))[-1]}
        assert heard == set(range(ranks))
