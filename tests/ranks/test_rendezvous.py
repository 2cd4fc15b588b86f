"""ranks/rendezvous.py: every process group of a script meets under keys of its own."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_parallel.ranks import process_group, rendezvous
from lightning_parallel.ranks.layout import Layout
from tools.workers.pool import WorkerPool


def sum_after_a_restart(ranks: list[int]) -> float:
    """torchrun starts all again, when some ranks had come to make a group. Its store keeps what they have written."""
    environment, wait = TorchElasticEnvironment(), timedelta(seconds=20)
    if environment.global_rank() in ranks:
        with suppress(TimeoutError):
            rendezvous.store_of_next_group(environment, timedelta(seconds=0.1))
    store = rendezvous.script_store(environment, wait)
    store.add("ended", 1)
    while store.add("ended", 0) < 3:  # torchrun ends all before it starts the first one again
        time.sleep(0.01)
    layout = Layout.resolve(3, environment.global_rank(), data=3)
    process_group.join(environment, layout, "gloo", wait)
    total = torch.ones(1)
    dist.all_reduce(total)
    process_group.close()
    return total.item()


@pytest.mark.parametrize("ranks", [[0], [1, 2]], ids=str)
def test_processes_that_were_started_again_meet(pool: WorkerPool, ranks: list[int]) -> None:
    assert pool.run(sum_after_a_restart, 3, ranks, init=False) == [3.0] * 3
