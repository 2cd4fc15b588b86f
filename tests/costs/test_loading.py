"""costs/loading.py: what a step waits for its batch."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_parallel
from lightning_parallel.costs.loading import Loaded, first_batch
from lightning_parallel.planning.table import Plan
from tests.faults.models import Blocks

SLEPT = 0.004


class Slow(Dataset[Tensor]):
    """Of so many samples, each of which takes a while."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SLEPT)
        return torch.full((2,), index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_timed_in_this_process(workers: int) -> None:
    loader = DataLoader(Slow(), batch_size=16, num_workers=workers, timeout=workers and 60)
    loaded = first_batch(loader)
    assert torch.equal(loaded.batch, next(iter(loader)))
    assert 16 * SLEPT <= loaded.seconds < 32 * SLEPT
    assert (loaded.workers, loader.num_workers) == (workers, workers)


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="data gives no batches"):
        first_batch(DataLoader(torch.zeros(0, 2)))


@pytest.mark.parametrize(
    ("workers", "replicas", "step", "waited"),
    [
        (0, 1, 1.0, 8.0),  # nothing is loaded meanwhile
        (0, 4, 1.0, 2.0),  # each loads its share
        (2, 1, 1.0, 3.0),
        (2, 4, 1.0, 0.0),
    ],
)
def test_workers_load_ahead(workers: int, replicas: int, step: float, waited: float) -> None:
    assert Loaded(None, 8.0, workers).waited(step, replicas, 1.0) == waited
    assert Loaded(None, 4.0, workers).waited(step, replicas, 0.5) == waited  # ranks share the cores


class Samples(Slow):
    """Of :class:`Blocks`."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        time.sleep(SLEPT)
        return tuple(each[index % len(each)] for each in Blocks.batches()[0])


def test_a_plan_counts_the_time_of_loading() -> None:
    size = len(Blocks.batches()[0][0])
    loader = DataLoader(Samples(), batch_size=size)
    found: Plan = lightning_parallel.plan(Blocks(), loader, devices=2, device="h100")
    for row in found.found:
        expected = size * SLEPT / row.choice.data
        assert expected <= row.time.loading < 2 * expected, str(row.choice)
        assert row.seconds > row.time.loading
    assert "no workers load ahead" in str(found)
    assert "Data:" not in str(lightning_parallel.plan(Blocks(), next(iter(loader)), devices=2, device="h100"))
