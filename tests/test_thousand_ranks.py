"""One rank of a thousand and more, in one process: it makes its own groups only, so its start hardly grows with the
number of ranks.

torch's fake process group has any number of ranks, and its collectives do nothing. What the ranks of a save agree on is
measured with the summaries of all.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from lightning_parallel.cuts.search import partition
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.channel import Link
from lightning_parallel.messages.message import TRAILER, encode, format_of
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.private.torch.groups import group_of_members
from lightning_parallel.ranks import groups as groups_module
from lightning_parallel.ranks import meeting
from lightning_parallel.ranks.groups import Groups, Wires
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import Step, placement
from lightning_parallel.schedules.named import SCHEDULES
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

META = torch.device("meta")  # messages carry nothing here


@contextmanager
def one_of(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Start:
    """What a rank made.

    Attributes:
        groups: their ranks.
        cuts: over which it sends activations or gets them.
        seconds: that it took.
    """

    groups: list[list[int]]
    cuts: list[int]
    seconds: float


def start(world_size: int, rank: int, pipeline: int, tensor: int) -> Start:
    """A rank makes its layout, its groups, and its links."""
    with one_of(world_size, rank):
        begin = time.process_time()
        layout = Layout.resolve(world_size, rank, pipeline=pipeline, data="auto", tensor=tensor)
        groups = Groups(layout)
        links = groups.wires(placement(SCHEDULES["interleaved"](pipeline, 2 * pipeline)))
        seconds = time.process_time() - begin
        made = [sorted(ranks) for group, ranks in _world.pg_group_ranks.items() if group is not dist.group.WORLD]
    return Start(made, sorted(links.activations), seconds)


@pytest.mark.parametrize(("pipeline", "tensor"), [(8, 8), (16, 8)])
@pytest.mark.parametrize("rank", [0, 515, 1023])
def test_a_rank_makes_only_the_groups_that_it_is_in(pool: WorkerPool, rank: int, pipeline: int, tensor: int) -> None:
    [found] = pool.run(start, 1, 1024, rank, pipeline, tensor, init=False)
    layout = Layout.resolve(1024, rank, pipeline=pipeline, data="auto", tensor=tensor)
    expected = [layout.peers("tensor"), layout.peers("data"), layout.peers("pipeline"), layout.model_peers()]
    assert found.groups == [sorted(ranks) for ranks in expected]
    stage, chunks = layout.stage, 2 * pipeline
    assert found.cuts == [c for c in range(chunks - 1) if stage in (c % pipeline, (c + 1) % pipeline)]
    assert found.seconds < 1  # milliseconds; making all groups of all ranks takes more


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


def first_batch(world_size: int, rank: int, name: str) -> tuple[float, int, list[int]]:
    """A rank cuts the model, and runs its part of a first batch. The announcements of its neighbours are made up.

    Returns:
        The seconds and the bytes of Python objects that it took; how many messages it sent and received.
    """
    stages, microbatches, width = 8, 16, 32
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(32)))
    batch = torch.ones(2, width)
    description = encode(format_of([batch.clone().requires_grad_()]))
    counts = [0, 0]

    def isend(link: Link, buffer: Tensor) -> Any:
        counts[0] += buffer.device == META
        return SimpleNamespace(wait=bool, is_completed=bool)

    def irecv(link: Link, buffer: Tensor) -> Any:
        counts[1] += buffer.device == META
        if len(buffer) == TRAILER:  # activations are described, gradients are as expected
            words = torch.tensor([len(description) if link._tag % 2 == 0 else 0, 0])
            buffer.copy_(words.view(torch.uint8))
        elif buffer.device != META:
            buffer.copy_(description)
        return SimpleNamespace(wait=bool, is_completed=bool)

    with ExitStack() as patches:
        patches.enter_context(one_of(world_size, rank))
        patches.enter_context(patch.object(Link, "isend", isend))
        patches.enter_context(patch.object(Link, "irecv", irecv))
        tracemalloc.start()
        begin = time.process_time()
        layout = Layout.resolve(world_size, rank, pipeline=stages, data="auto", tensor=8)
        groups = Groups(layout)
        lists = SCHEDULES[name](stages, microbatches)
        parts = partition(net, lambda: net(batch).sum(), stages, placement=placement(lists))
        net.to(META)
        given = batch.to(META)
        stage = Stage(net, parts, layout.stage, META)
        stage.flow = stage.flow_of(lambda: net(given).sum())
        stage.install()
        wires = groups.wires(parts.placement)
        links = Wires(
            {cut: replace(wire, host_group=groups.host_group) for cut, wire in wires.activations.items()},
            {cut: replace(wire, host_group=groups.host_group) for cut, wire in wires.gradients.items()},
        )
        engine = Engine(stage, layout, links, META, loss_of=lambda loss: loss)
        loss, last = BatchLoss([1] * microbatches), microbatches - 1
        work = {
            k: Microbatch(lambda: net(given).sum(), 1.0, loss, index=k, seed=k, ends_batch=k == last)
            for k in range(microbatches)
        }
        engine.run([action for action in lists[layout.stage] if not isinstance(action, Step)], work)
        seconds = time.process_time() - begin
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return seconds, peak, counts


@pytest.mark.parametrize("name", ["1f1b", *thorough("zbv")])
def test_a_first_batch_costs_the_same_with_a_thousand_ranks_as_with_few(pool: WorkerPool, name: str) -> None:
    """128 ranks have 2 replicas, 1,024 have 16, 8,192 have 128."""
    found = {n: pool.run(first_batch, 1, n, n // 2, name, init=False)[0] for n in (128, 1024, 8192)}
    assert found[1024][2] == found[128][2] and sum(found[1024][2]) > 0
    assert found[1024][0] < 3 * found[128][0] + 0.5  # a machine that does something else
    assert found[8192][1] < 1.5 * found[128][1]
