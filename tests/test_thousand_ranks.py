"""One rank of a thousand and more, in one process: it makes its own groups only, so its start hardly grows with the
number of ranks.

torch's fake process group has any number of ranks, and its collectives do nothing. What a batch computes knows of the
layout's axes alone.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from lightning_parallel.private.torch.groups import group_of_members
from lightning_parallel.ranks import groups as groups_module
from lightning_parallel.ranks import meeting
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import placement
from lightning_parallel.schedules.named import SCHEDULES
from tools.workers.pool import WorkerPool


@contextmanager
def one_of(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def start(world_size: int, rank: int, pipeline: int, tensor: int) -> tuple[list[list[int]], list[int], int]:
    """A rank makes its layout, its groups and its links: the ranks of its groups, the cuts over which it sends
    activations or gets them, and the bytes of Python objects that it takes at most."""
    with one_of(world_size, rank):
        tracemalloc.start()
        layout = Layout.resolve(world_size, rank, pipeline=pipeline, data="auto", tensor=tensor)
        links = Groups(layout).wires(placement(SCHEDULES["interleaved"](pipeline, 2 * pipeline)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        made = [sorted(ranks) for group, ranks in _world.pg_group_ranks.items() if group is not dist.group.WORLD]
    return made, sorted(links.activations), peak


@pytest.mark.parametrize(("pipeline", "tensor"), [(8, 8), (16, 8)])
@pytest.mark.parametrize("rank", [0, 515, 1023])
def test_a_rank_makes_only_the_groups_that_it_is_in(pool: WorkerPool, rank: int, pipeline: int, tensor: int) -> None:
    [(groups, cuts, _)] = pool.run(start, 1, 1024, rank, pipeline, tensor, init=False)
    layout = Layout.resolve(1024, rank, pipeline=pipeline, data="auto", tensor=tensor)
    expected = [layout.peers("tensor"), layout.peers("data"), layout.peers("pipeline"), layout.model_peers()]
    assert groups == [sorted(ranks) for ranks in expected]
    stage, chunks = layout.stage, 2 * pipeline
    assert cuts == [c for c in range(chunks - 1) if stage in (c % pipeline, (c + 1) % pipeline)]


def test_eight_times_as_many_ranks_take_no_more_memory(pool: WorkerPool) -> None:
    few, many = (pool.run(start, 1, ranks, ranks // 2, 8, 8, init=False)[0][-1] for ranks in (1024, 8192))
    assert many < 1.5 * few


def groups_over_nccl(name: str) -> tuple[int, int]:
    """How many groups a rank of 1,024 joins, with the world, and with those in which it asks for signals."""

    def fake(ranks: Sequence[int], timeout: Any, backend: str | None, purpose: str) -> dist.ProcessGroup:
        return group_of_members(ranks, timeout, "fake", f"{backend} {purpose}")

    with one_of(1024, 515), ExitStack() as patches:
        for module in (groups_module, meeting):
            patches.enter_context(patch.object(module, "group_of_members", fake))
        patches.enter_context(patch.object(dist, "get_backend", lambda *args: "nccl"))
        for messages in ("send", "recv", "all_reduce"):
            patches.enter_context(patch.object(dist, messages))
        groups = Groups(Layout.resolve(1024, 515, pipeline=8, data="auto", tensor=8))
        groups.wires(placement(SCHEDULES[name](8, 16)))
        joined = len(_world.pg_group_ranks)
        meeting.Meeting(1024, None)
        return joined, len(_world.pg_group_ranks)


@pytest.mark.parametrize(("name", "joined"), [("1f1b", 8), ("interleaved", 10)])
def test_over_nccl_there_are_groups_for_lanes_and_for_hosts_too(pool: WorkerPool, name: str, joined: int) -> None:
    """World, three axes, model, hosts of the pipeline, two kinds of messages a lane; row and column of the signals."""
    assert pool.run(groups_over_nccl, 1, name, init=False) == [(joined, joined + 2)]
