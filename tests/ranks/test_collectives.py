"""Copies become equal, whatever they are made of; ranks fail together; a broken collective says that a rank is gone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.ranks.collectives import (
    broadcast_tensors,
    decided_by_first,
    guarded,
    together,
)
from tools.workers.pool import WorkerPool


def copies(source: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    tensors = [
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
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        broadcast_tensors(tensors, source, group)
    assert sent.call_count == 2  # the large one goes alone
    assert tensors.pop()[-1] == source
    tensors[3] = tensors[3].float()  # results can't be sent in 8 bits
    return [tensor.detach().clone() for tensor in tensors]


def test_all_ranks_have_what_the_source_has(pool: WorkerPool) -> None:
    for source in (0, 2):
        for found in pool.run(copies, 3, source):
            parameter, integers, flag, small, numbers, nothing, expanded = found
            assert torch.equal(expanded, torch.full((2, 3), float(source)))
            assert torch.equal(parameter, torch.full((2, 3), float(source)))
            assert torch.equal(integers, torch.full((2, 3), source, dtype=torch.int16))
            assert bool(flag) == bool(source)
            assert small.tolist() == [source] * 4
            assert torch.equal(numbers, torch.full((2,), complex(source, source)))
            assert nothing.shape == (0, 3)


def fail_in(how: str, failing: int, error: type[Exception]) -> None:
    """One rank fails, of all or of a group of the others than the first one."""
    group = dist.new_group([1, 2]) if "group" in how else None
    if group is not None and dist.get_rank() == 0:
        return

    def action() -> None:
        if dist.get_rank() == failing:
            raise error("no luck")

    decided_by_first(group, action) if "first" in how else together(group, action)


@pytest.mark.parametrize(("how", "failing", "others"), [
    ("together", 1, (0, 2)), ("first decides", 0, (1, 2)),
    ("group together", 2, (1,)), ("group's first decides", 1, (2,)),
])  # fmt: skip
@pytest.mark.parametrize(("error", "said"), [
    (ValueError, "ValueError: rank {}: no luck"), (OSError, "RuntimeError: rank {}: OSError: no luck")
])  # fmt: skip
def test_the_failure_of_one_rank_is_raised_on_all_and_names_it_by_its_global_rank(
    pool: WorkerPool, how: str, failing: int, others: tuple[int, ...], error: type[Exception], said: str
) -> None:
    errors = pool.run(fail_in, 3, how, failing, error, expect_errors=True)
    assert f"{error.__name__}: no luck" in errors[failing]
    assert all(said.format(failing) in errors[rank] for rank in others)


def reduce_what_the_backend_does_not_know() -> None:
    guarded(dist.all_reduce, torch.ones(2, dtype=torch.int16))


def test_what_the_backend_refuses_is_not_taken_for_a_lost_peer(pool: WorkerPool) -> None:
    for failure in pool.run(reduce_what_the_backend_does_not_know, 2, expect_errors=True):
        assert "RuntimeError: Invalid scalar type" in failure and "PeerLostError" not in failure
