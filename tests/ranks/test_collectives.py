"""Copies become equal, whatever they are made of; ranks fail together; all hear the highest number that one has."""

from __future__ import annotations

import math
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.ranks import meeting
from lightning_parallel.ranks.collectives import broadcast_tensors, decided_by_first, guarded, together
from lightning_parallel.ranks.meeting import Meeting, row_and_column
from tools.workers.pool import WorkerPool


def copies(source: int) -> None:
    def values(rank: int) -> list[torch.Tensor]:
        return [
            nn.Parameter(torch.full((2, 3), float(rank))),
            torch.full((3, 2), rank, dtype=torch.int16).t(),  # not contiguous
            torch.tensor(bool(rank)),
            torch.full((4,), float(rank)).to(torch.float8_e4m3fn),
            torch.full((2,), complex(rank, rank)),
            torch.zeros(0, 3),
            torch.full((1, 3), float(rank)).expand(2, 3),  # rows in one place
            torch.full((2**23,), float(rank)),
        ]

    group = dist.group.WORLD
    assert group is not None
    tensors = values(dist.get_rank())
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        broadcast_tensors(tensors, source, group)
    assert sent.call_count == 2  # the large one goes alone
    assert all(str(one) == str(other) for one, other in zip(tensors, values(source), strict=True))


def test_all_ranks_have_what_the_source_has(pool: WorkerPool) -> None:
    pool.run(copies, 3, 2)


def fail_in(how: str, failing: int, error: type[Exception]) -> None:
    """One rank fails, of all or of a group of the others than the first one."""
    group = dist.new_group([1, 2]) if "group" in how else None
    if group is not None and dist.get_rank() == 0:
        return

    def action() -> None:
        if dist.get_rank() == failing:
            raise error("no luck")

    decided_by_first(group, action) if "first" in how else together(group, action)


@pytest.mark.parametrize(("how", "failing", "others", "error", "said"), [
    ("together", 1, (0, 2), OSError, "RuntimeError: rank 1: OSError: no luck"),
    ("group together", 2, (1,), ValueError, "ValueError: rank 2: no luck"),
    ("group's first decides", 1, (2,), ValueError, "ValueError: rank 1: no luck"),
])  # fmt: skip
def test_the_failure_of_one_rank_is_raised_on_all_and_names_it_by_its_global_rank(
    pool: WorkerPool, how: str, failing: int, others: tuple[int, ...], error: type[Exception], said: str
) -> None:
    errors = pool.run(fail_in, 3, how, failing, error, expect_errors=True)
    assert f"{error.__name__}: no luck" in errors[failing]
    assert all(said in errors[rank] for rank in others)


def reduce_what_the_backend_does_not_know() -> None:
    guarded(dist.all_reduce, torch.ones(2, dtype=torch.int16))


def test_what_the_backend_refuses_is_not_taken_for_a_lost_peer(pool: WorkerPool) -> None:
    for failure in pool.run(reduce_what_the_backend_does_not_know, 2, expect_errors=True):
        assert "RuntimeError: Invalid scalar type" in failure and "PeerLostError" not in failure


# -- between two batches -----------------------------------------------------------------------------------------


def highest_of_many(numbers: list[int]) -> list[list[int]]:
    """In one ring on the host, as on GPUs, and along rows and columns."""
    with patch.object(dist, "get_backend", lambda *args: "nccl"):
        on_host = Meeting(len(numbers), timedelta(seconds=20))
    with patch.object(meeting, "_IN_ONE_RING", 1):
        in_lines = Meeting(len(numbers), timedelta(seconds=20))
    turns = [(on_host, 0), *((in_lines, turn) for turn in range(3))]
    return [made.highest(numbers[(dist.get_rank() + turn) % len(numbers)], turn) for made, turn in turns]


@pytest.mark.parametrize("numbers", [[0, 1, 0, 0], [2, 0, 0]])
def test_all_hear_the_highest(pool: WorkerPool, numbers: list[int]) -> None:
    found = pool.run(highest_of_many, len(numbers), numbers)
    assert found == [[[max(numbers), turn] for turn in (0, 0, 1, 2)]] * len(numbers)


@pytest.mark.parametrize(("ranks", "lengths"), [(1024, [32, 32]), (96, [8, 12]), (127, [127])])
def test_rows_and_columns_join_all_ranks(ranks: int, lengths: list[int]) -> None:
    for rank in (0, 77, ranks - 1):
        lines = row_and_column(rank, ranks, math.isqrt(ranks))
        assert [len(line) for line in lines] == lengths and all(rank in line for line in lines)
        heard = {other for one in lines[0] for other in row_and_column(one, ranks, math.isqrt(ranks))[-1]}
        assert heard == set(range(ranks))
