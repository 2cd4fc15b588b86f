"""The pool of worker processes that the other tests run on."""

from __future__ import annotations

import os
import random
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tools.workers.pool import Failure, WorkerError, WorkerPool


def rank() -> int:
    return dist.get_rank()


def spoil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    # As Lightning leaves it when a hook that makes a loader raises.
    DataLoader.__old__init__, DataLoader.__init__ = DataLoader.__init__, spoil  # type: ignore[attr-defined, method-assign]
    os.environ["PL_GLOBAL_SEED"] = "7"
    os.environ.pop("PATH")
    Path("left_behind").touch()
    os.chdir("/")


def state() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "path": "PATH" in os.environ,
        "files": os.listdir(),
        "random": (torch.rand(1).item(), random.random()),
        "loaders": DataLoader.__init__.__name__,
    }


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def test_nothing_of_a_call_reaches_the_next(pool: WorkerPool) -> None:
    before = pool.run(state, 2)
    pool.run(spoil, 2)
    assert pool.run(state, 2) == before
    assert before[0]["files"] == [] and before[0]["path"] and before[0]["seed"] is None


def test_an_error_frees_the_ranks_that_wait(pool: WorkerPool) -> None:
    results = pool.run(fail_on, 3, 1, expect_errors=True)
    assert all(isinstance(result, Failure) for result in results)
    assert "ValueError: rank 1 has had enough" in results[1]
    assert pool.run(rank, 3) == [0, 1, 2]


def test_a_hung_rank_is_named_with_its_stack_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 had not answered") as caught:
        pool.run(hang_on, 2, 1, timeout=1.0, init=False)
    assert list(caught.value.errors) == [1] and "in hang_on" in caught.value.errors[1]
    assert pool.run(rank, 2) == [0, 1]
