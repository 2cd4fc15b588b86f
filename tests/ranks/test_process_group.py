"""ranks/process_group.py: a process joins one group after the other, and takes nothing of an old one along."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_parallel.ranks import process_group
from lightning_parallel.ranks.layout import Layout
from tests.pool import WorkerPool
from tests.strategies.harness import Report, joined, train
from tests.thorough import thorough
from tests.worker import rejoin

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_ranks_that_share_a_gpu_use_gloo() -> None:
    assert process_group.backend_for([CPU, CPU], CPU) == "gloo"
    assert process_group.backend_for([GPU, GPU], GPU) == "gloo"
    assert process_group.backend_for([GPU], GPU) == "nccl"
    assert process_group.backend_for([GPU, torch.device("cuda", 1)], GPU) == "nccl"


def train_in_two_groups(other_groups: int) -> tuple[Report, Report]:
    """The second run's groups have other names than the first one's."""
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    first = train("Blocks", "sync", options)
    rejoin()
    dist.init_process_group("gloo")
    for _ in range(other_groups):
        dist.new_group([0])
    return first, train("Blocks", "sync", options)


@pytest.mark.parametrize("other_groups", [3, *thorough(1)])
def test_fully_sharded_layers_use_the_groups_of_their_own_run(pool: WorkerPool, other_groups: int) -> None:
    ranks = pool.run(train_in_two_groups, 4, other_groups, init=False)
    first, second = (joined(list(reports), "weights") for reports in zip(*ranks, strict=True))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def join_another_size() -> None:
    process_group.join(LightningEnvironment(), Layout.resolve(3, data=3), "gloo", timedelta(seconds=5))


def test_a_group_of_another_size_is_refused(pool: WorkerPool) -> None:
    for failure in pool.run(join_another_size, 2, expect_errors=True):
        assert "A process group of 2 processes exists already, but this Trainer asks for 3" in failure


def join_with(backend: str) -> None:
    dist.init_process_group(backend)
    dist.barrier()  # a rank that is refused leaves, and the other one may still be connecting
    process_group.join(LightningEnvironment(), Layout.resolve(2, data=2), "gloo", timedelta(seconds=5))


def test_a_group_of_several_backends_is_refused(pool: WorkerPool) -> None:
    """Messages of both kinds would share one queue."""
    for failure in pool.run(join_with, 2, "cpu:gloo", init=False, expect_errors=True):
        assert "backend='cpu:gloo' exists already" in failure and "make it with backend='gloo' or 'nccl'." in failure


def join_bound() -> None:
    dist.barrier()
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = GPU
    process_group.join(LightningEnvironment(), Layout.resolve(2, data=2), "gloo", timedelta(seconds=5))


def test_a_group_that_is_bound_to_a_device_is_refused(pool: WorkerPool) -> None:
    """NCCL would split it for each later group, and wait for ranks that don't come."""
    for failure in pool.run(join_bound, 2, expect_errors=True):
        assert "made with device_id= exists already" in failure and "make it without device_id=." in failure


def join_unknown() -> None:
    try:
        process_group.join(LightningEnvironment(), Layout.resolve(1), "xccl", timedelta(seconds=5))
    finally:
        assert not dist.is_initialized()


def test_an_unknown_backend_is_refused_before_the_group_is_made(pool: WorkerPool) -> None:
    [failure] = pool.run(join_unknown, 1, init=False, expect_errors=True)
    assert "ValueError: process_group_backend='xccl' isn't known here: set it to 'gloo', or to 'nccl'." in failure


@pytest.mark.parametrize(("backend", "way"), [("nccl", "aborted"), ("gloo", "destroyed")])
def test_after_an_error_nccl_is_not_waited_for(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ways.append("destroyed"))
    monkeypatch.setattr(process_group, "abort_groups", lambda: ways.append("aborted"))
    process_group.close()
    assert ways == [way]


@pytest.mark.parametrize(("backend", "ways"), [("nccl", ["waited", "destroyed"]), ("gloo", ["destroyed"])])
def test_a_rank_leaves_when_its_gpu_has_sent_all(
    monkeypatch: pytest.MonkeyPatch, backend: str, ways: list[str]
) -> None:
    """Else the last message of an evaluation, which no gradient answers, could be lost."""
    found: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("waited"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    process_group.leave()
    assert found == ways


def test_a_rank_whose_gpu_has_failed_leaves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr(process_group, "abort_groups", lambda: found.append("aborted"))
    monkeypatch.setattr(process_group.rendezvous, "end", lambda: found.append("left"))
    process_group.leave()
    assert found == ["aborted", "left"]
