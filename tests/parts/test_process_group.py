"""parts/process_group.py: a process joins one group after the other, and takes nothing of an old one along."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_parallel.layout import Layout
from lightning_parallel.parts import process_group
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
    process_group.join(LightningEnvironment(), Layout.resolve(3, data=3), "gloo", timedelta(seconds=5), CPU)


def test_a_group_of_another_size_is_refused(pool: WorkerPool) -> None:
    for failure in pool.run(join_another_size, 2, expect_errors=True):
        assert "A process group of 2 processes exists already, but this Trainer asks for 3" in failure
