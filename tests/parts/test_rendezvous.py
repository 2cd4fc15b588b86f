"""parts/rendezvous.py: every process group of a script meets under keys of its own."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_parallel.layout import Layout
from lightning_parallel.parts import process_group, rendezvous
from tests.pool import WorkerPool


def sums_of_groups() -> list[float]:
    """A sum in each of three groups, which are closed as after an error. Rank 1 is at the next one first, when what
    the store has of rank 0 is of the last one."""
    found = []
    for number in range(3):
        environment, cpu = TorchElasticEnvironment(), torch.device("cpu")
        if environment.global_rank() == 0 and number:
            time.sleep(1.0)
        layout = Layout.resolve(2, environment.global_rank(), data=2)
        process_group.join(environment, layout, "gloo", timedelta(seconds=20), cpu)
        total = torch.ones(1)
        dist.all_reduce(total)
        found.append(total.item())
        process_group.close()
    return found


def test_a_group_can_be_joined_after_one_that_was_closed(pool: WorkerPool) -> None:
    assert pool.run(sums_of_groups, 2, init=False) == [[2.0, 2.0, 2.0]] * 2


def sum_after_a_restart() -> float:
    """torchrun starts both again, when only rank 0 had begun to make a group."""
    environment, wait = TorchElasticEnvironment(), timedelta(seconds=20)
    if environment.global_rank() == 0:
        rendezvous.store_of_next_group(environment, wait)
    rendezvous.end()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    layout = Layout.resolve(2, environment.global_rank(), data=2)
    process_group.join(environment, layout, "gloo", wait, torch.device("cpu"))
    total = torch.ones(1)
    dist.all_reduce(total)
    process_group.close()
    return total.item()


def test_processes_that_were_started_again_meet(pool: WorkerPool) -> None:
    assert pool.run(sum_after_a_restart, 2, init=False) == [2.0, 2.0]
