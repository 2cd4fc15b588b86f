"""The pool of worker processes that the other tests run on."""

from __future__ import annotations

import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.utils.data import DataLoader

from tests.pool import Failure, WorkerError, WorkerPool
from tests.worker import rejoin


def reduced(value: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total * factor


def identity() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def environment() -> dict[str, object]:
    cluster = TorchElasticEnvironment()
    return {
        "initialized": dist.is_initialized(),
        "detected": TorchElasticEnvironment.detect(),
        "rank": cluster.global_rank(),
        "size": cluster.world_size(),
        "node": cluster.node_rank(),
    }


def spoil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
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


def give_a_lambda() -> object:
    return lambda: None


def joined_again() -> list[float]:
    totals = []
    for _ in range(3):
        if dist.is_initialized():
            rejoin()
        dist.init_process_group("gloo")
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        totals.append(total.item())
    return totals


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        prediction: torch.Tensor = self.layer(batch)
        return prediction.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit() -> list[torch.Tensor]:
    rows: Any = torch.randn(8, 4)
    loader: DataLoader[torch.Tensor] = DataLoader(rows, batch_size=2, num_workers=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    trainer.fit(model, loader)
    return [parameter.detach() for parameter in model.parameters()]


def test_results_come_by_rank_and_tensors_by_value(pool: WorkerPool) -> None:
    results = pool.run(reduced, 3, torch.ones(2), factor=0.5)
    assert [result.tolist() for result in results] == [[3.0, 3.0]] * 3
    assert not results[0].is_shared()


def test_workers_stay_from_call_to_call(pool: WorkerPool) -> None:
    first, second = pool.run(identity, 2), pool.run(identity, 3)
    assert [rank for rank, _ in second] == [0, 1, 2]
    assert second[:2] == first
    assert len({process for _, process in second}) == 3


def test_a_later_call_is_cheap(pool: WorkerPool) -> None:
    pool.run(identity, 2)
    start = time.monotonic()
    for _ in range(3):
        pool.run(identity, 2)
    assert (time.monotonic() - start) / 3 < 2.0


def test_lightning_takes_a_worker_for_one_of_torchrun(pool: WorkerPool) -> None:
    for rank, answer in enumerate(pool.run(environment, 2, init=False)):
        assert answer == {"initialized": False, "detected": True, "rank": rank, "size": 2, "node": 0}


def test_a_trainer_joins_and_leaves(pool: WorkerPool) -> None:
    for _ in range(2):
        first, second = pool.run(fit, 2, init=False)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert pool.run(environment, 1, init=False)[0]["initialized"] is False


def test_nothing_of_a_call_reaches_the_next(pool: WorkerPool) -> None:
    before = pool.run(state, 2)
    pool.run(spoil, 2)
    assert pool.run(state, 2) == before
    assert before[0]["files"] == [] and before[0]["path"] and before[0]["seed"] is None


def test_a_group_can_be_joined_again_within_a_call(pool: WorkerPool) -> None:
    assert pool.run(joined_again, 2, init=False) == [[1.0] * 3] * 2


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
    processes = pool.run(identity, 3)
    assert [rank for rank, _ in processes] == [0, 1, 2]


def test_expected_errors_leave_the_other_results(pool: WorkerPool) -> None:
    results = pool.run(fail_on, 2, 1, wait=False, expect_errors=True)
    assert results[0] == 0 and isinstance(results[1], Failure)


def test_a_result_that_cannot_be_sent_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="give_a_lambda"):
        pool.run(give_a_lambda, 1)


def test_a_local_function_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda: None, 1)


def test_a_hung_rank_is_named_with_its_stack_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 had not answered") as caught:
        pool.run(hang_on, 2, 1, timeout=3.0, init=False)
    assert list(caught.value.errors) == [1] and "in hang_on" in caught.value.errors[1]
    assert [rank for rank, _ in pool.run(identity, 2)] == [0, 1]


def test_a_dead_rank_is_named_and_replaced(pool: WorkerPool) -> None:
    results = pool.run(die_on, 2, 0, expect_errors=True)
    assert "died, exit code 3" in results[0] and isinstance(results[1], Failure)
    assert [rank for rank, _ in pool.run(identity, 2)] == [0, 1]
