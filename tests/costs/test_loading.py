"""costs/loading.py: what a step waits for its batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_parallel
from lightning_parallel.comparison.runs import first_batches, loader_of
from lightning_parallel.comparison.timing import Measured
from lightning_parallel.costs.loading import Loaded, first_batch
from lightning_parallel.planning.table import Plan
from tools.faults.models import Blocks

SLEPT = 0.004


class Slow(Dataset[Tensor]):
    """Of so many samples, each of which takes a while."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SLEPT)
        return torch.full((2,), index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_timed(workers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        Slow(), batch_size=16, num_workers=workers, timeout=workers and 60, shuffle=True, generator=generator
    )
    before = generator.get_state()
    loaded = first_batch(loader)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(loaded.batch, next(iter(loader)))
    assert 16 * SLEPT <= loaded.seconds < 32 * SLEPT
    assert (loaded.workers, loader.num_workers) == (workers, workers)


def test_a_slow_start_is_no_slow_loader() -> None:
    def stream() -> Iterator[int]:
        time.sleep(1.1)
        yield from range(8)

    assert first_batch(stream()).seconds < 0.1


class Several(L.LightningDataModule):
    """Two loaders, of which a Trainer makes one."""

    def train_dataloader(self) -> dict[str, DataLoader[Tensor]]:
        return {"one": DataLoader(Slow(), batch_size=2), "two": DataLoader(Slow(), batch_size=3)}


def test_several_loaders_give_one_batch() -> None:
    common = {"accelerator": "cpu"}
    loaded = first_batch(loader_of(Blocks(), Several(), common))
    assert loaded.workers == 0 and loaded.seconds > 5 * SLEPT
    for batch in (loaded.batch, *first_batches(Blocks(), Several(), 2, common)):
        assert [len(each) for each in batch.values()] == [2, 3]


@pytest.mark.parametrize(("workers", "replicas", "waited"), [
    (0, 1, 8.0), (0, 4, 2.0),  # nothing is loaded meanwhile; each loads its share
    (2, 1, 3.0), (2, 4, 0.0),
])  # fmt: skip
def test_workers_load_ahead(workers: int, replicas: int, waited: float) -> None:
    assert Loaded(None, 8.0, workers).waited(1.0, replicas, 1.0) == waited
    assert Loaded(None, 4.0, workers).waited(1.0, replicas, 0.5) == waited  # ranks share the cores


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
        assert row.seconds == row.time.total
    assert "without workers" in str(found)
    assert "Data:" not in str(lightning_parallel.plan(Blocks(), next(iter(loader)), devices=2, device="h100"))


def test_workers_load_while_a_measured_step_runs() -> None:
    size = len(Blocks.batches()[0][0])
    loader = DataLoader(Samples(), batch_size=size, num_workers=1)
    row = lightning_parallel.plan(Blocks(), loader, devices=2, device="h100").best
    assert row.time.loading > 2 / 3 * row.time.total  # by the prediction it waits
    short, long = (replace(row, measured=Measured(each, 1)) for each in (1e-3, 10.0))
    assert short.seconds == pytest.approx(row.seconds)
    assert long.seconds == 10.0
