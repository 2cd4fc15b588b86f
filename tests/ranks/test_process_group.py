"""ranks/process_group.py: a process joins one group after the other, and takes nothing of an old one along."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.ranks import process_group
from lightning_parallel.ranks.layout import Layout
from tools.workers.pool import WorkerPool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_ranks_that_share_a_gpu_use_gloo() -> None:
    assert process_group.backend_for([CPU, CPU], CPU) == "gloo"
    assert process_group.backend_for([GPU, GPU], GPU) == "gloo"
    assert process_group.backend_for([GPU], GPU) == "nccl"
    assert process_group.backend_for([GPU, torch.device("cuda", 1)], GPU) == "nccl"


def sizes_of_the_cache_of_meshes() -> tuple[int, int]:
    """The misses that have filled it, before a run joins its group and after."""
    half = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    half + half
    _, before = torch._C._get_DTensor_sharding_propagator_cache_stats()
    process_group.join(LightningEnvironment(), Layout.resolve(2, data=2), "gloo", timedelta(seconds=5))
    _, after = torch._C._get_DTensor_sharding_propagator_cache_stats()
    return before, after


def test_a_run_finds_no_meshes_of_an_earlier_one(pool: WorkerPool) -> None:
    """Otherwise it may fail: "Could not resolve the process group registered under the name"."""
    assert all(before > after == 0 for before, after in pool.run(sizes_of_the_cache_of_meshes, 2))


def join(size: int, made: str | None, bound: bool = False, backend: str = "gloo") -> None:
    """Join where a group of two was made by somebody else, or none."""
    if made is not None:
        dist.init_process_group(made)
        dist.barrier()  # a rank that is refused leaves, and the other one may still be connecting
    if bound:
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = GPU
    try:
        process_group.join(LightningEnvironment(), Layout.resolve(size, data=size), backend, timedelta(seconds=5))
    finally:
        assert dist.is_initialized() == (made is not None)


@pytest.mark.parametrize(("arguments", "words"), [
    ((3, "gloo"), ["A process group of 2 processes exists already, but this Trainer asks for 3"]),
    # Messages of both kinds would share one queue.
    ((2, "cpu:gloo"), ["backend='cpu:gloo' exists already", "make it with backend='gloo' or 'nccl'."]),
    # NCCL would split it for each later group, and wait for ranks that don't come.
    ((2, "gloo", True), ["made with device_id= exists already", "make it without device_id=."]),
    ((2, None, False, "xccl"), ["process_group_backend='xccl' isn't known here: set it to 'gloo', or to 'nccl'."]),
])  # fmt: skip
def test_a_group_that_does_not_fit_is_refused(pool: WorkerPool, arguments: tuple[Any, ...], words: list[str]) -> None:
    for failure in pool.run(join, 2, *arguments, init=False, expect_errors=True):
        assert all(word in failure for word in words)


# What this rank does to the process group that it seems to have, after an error (close) and in the end (leave).
@pytest.mark.parametrize(("end", "backend", "gpu", "ways"), [
    # After an error NCCL is not waited for.
    (process_group.close, "nccl", "has sent all", ["aborted"]),
    (process_group.close, "gloo", "", ["destroyed"]),
    # In the end it is, or the last message of an evaluation, which no gradient answers, could be lost.
    (process_group.leave, "gloo", "", ["destroyed", "left"]),
    (process_group.leave, "nccl", "has sent all", ["waited", "destroyed", "left"]),
    (process_group.leave, "nccl", "fails", ["aborted", "left"]),
    (process_group.leave, "nccl", "never comes to an end", ["aborted", "left"]),
])  # fmt: skip
def test_a_rank_leaves_when_its_gpu_has_sent_all_or_will_not(
    end: Callable[[], None], backend: str, gpu: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ended = list[str](), Event()

    def synchronize(device: int) -> None:
        if gpu == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if gpu == "never comes to an end":
            ended.wait()
        found.append("waited")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(process_group, "abort_groups", lambda: found.append("aborted"))
    monkeypatch.setattr(process_group.rendezvous, "end", lambda: found.append("left"))
    monkeypatch.setattr(process_group.gc, "collect", lambda: 0)  # which takes a while in a session of tests
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(process_group, "_PATIENCE", 0.05)
    end()
    assert found == ways
    ended.set()
