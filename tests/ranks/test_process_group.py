"""ranks/process_group.py: a process joins one group after the other, and takes nothing of an old one along."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from subprocess import PIPE, STDOUT
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
from tests.machines import two_machines
from tools.workers.pool import WorkerPool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_ranks_that_share_a_gpu_use_gloo() -> None:
    assert process_group.backend_for([CPU, CPU], CPU) == "gloo"
    assert process_group.backend_for([GPU, GPU], GPU) == "gloo"
    assert process_group.backend_for([GPU], GPU) == "nccl"
    assert process_group.backend_for([GPU, torch.device("cuda", 1)], GPU) == "nccl"


MEETS_AT_THE_WRONG_PLACE = """
import sys
from datetime import timedelta
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning_parallel.ranks import process_group
from lightning_parallel.ranks.layout import Layout

try:
    layout = Layout.resolve(2, int(sys.argv[1]), data=2)
    process_group.join(TorchElasticEnvironment(), layout, "gloo", timedelta(seconds=2))
finally:
    sys.stdin.read()  # rank 0 has the store
"""


# By default, tests/private/test_torch.py has what gloo says.
@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces can't be made")
def test_where_gloo_takes_an_address_of_one_machine_alone_the_error_names_the_setting() -> None:
    """As where the name of each machine is 127.0.1.1."""
    with two_machines() as machines:
        if not machines[0].enter:
            pytest.skip("network namespaces can't be made")
        variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        variables = os.environ | variables | {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29517"}
        ranks = [
            subprocess.Popen(
                [*machine.enter, sys.executable, "-c", MEETS_AT_THE_WRONG_PLACE, str(rank)], text=True,
                env=variables | {"RANK": str(rank)}, stdin=PIPE, stdout=PIPE, stderr=STDOUT,
            )
            for rank, machine in enumerate(machines)
        ]  # fmt: skip
        said = [each.communicate(timeout=100)[0] for each in reversed(ranks)]
    assert "gloo could not connect the ranks: nobody answered at 127.0.0.1" in "".join(said)  # one of them tries
    for each in said:
        assert "Set GLOO_SOCKET_IFNAME on all machines" in each and "cluster.interface" in each


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
