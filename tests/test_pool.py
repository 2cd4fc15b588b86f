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

from tests.pool import Failure, WorkerError, WorkerPool


def reduced(value: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total * factor


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


def fail_on(*ranks: int, wait: bool = True) -> int:
    if dist.get_rank() in ranks:
        print("the last words")
        raise ValueError(f"rank {dist.get_rank()} has had enough")
    if wait:
        dist.barrier()
    return dist.get_rank()


def hang_on(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)
    return int(os.environ["RANK"])


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()
    return "not reached"


def test_results_come_by_rank_and_tensors_by_value(pool: WorkerPool) -> None:
    results = pool.run(reduced, 3, torch.ones(2), factor=0.5)
    assert [result.tolist() for result in results] == [[3.0, 3.0]] * 3
    assert not results[0].is_shared()


def test_nothing_of_a_call_reaches_the_next(pool: WorkerPool) -> None:
    before = pool.run(state, 2)
    pool.run(spoil, 2)
    assert pool.run(state, 2) == before
    assert before[0]["files"] == [] and before[0]["path"] and before[0]["seed"] is None


def test_an_error_names_rank_exception_and_output(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 has had enough") as caught:
        pool.run(fail_on, 3, 1, 2, wait=False)
    assert caught.value.rank == 1 and sorted(caught.value.errors) == [1, 2]
    assert "in fail_on" in caught.value.errors[2] and "the last words" in caught.value.errors[2]


def test_an_error_frees_the_ranks_that_wait(pool: WorkerPool) -> None:
    start = time.monotonic()
    results = pool.run(fail_on, 3, 1, expect_errors=True)
    assert time.monotonic() - start < 15.0
    assert all(isinstance(result, Failure) for result in results)
    assert "ValueError: rank 1 has had enough" in results[1]
    assert pool.run(rank, 3) == [0, 1, 2]


def test_a_hung_rank_is_named_with_its_stack_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 had not answered") as caught:
        pool.run(hang_on, 2, 1, timeout=3.0, init=False)
    assert list(caught.value.errors) == [1] and "in hang_on" in caught.value.errors[1]
    assert pool.run(rank, 2) == [0, 1]


def test_a_dead_rank_is_named_and_replaced(pool: WorkerPool) -> None:
    results = pool.run(die_on, 2, 0, expect_errors=True)
    assert "died, exit code 3" in results[0] and isinstance(results[1], Failure)
    assert pool.run(rank, 2) == [0, 1]
