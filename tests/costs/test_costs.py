"""What a step waits for its batch, what a layer takes on numbers of samples that weren't tried, and what an optimizer's
step takes, which is tried on tensors like the parameters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_parallel
from lightning_parallel.comparison.runs import first_batches, loader_of
from lightning_parallel.comparison.timing import Measured
from lightning_parallel.costs import loading
from lightning_parallel.costs.devices import Device, seconds_of
from lightning_parallel.costs.layer_costs import Cost
from lightning_parallel.costs.loading import Loaded, first_batch
from lightning_parallel.costs.updates import Updates
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


def test_a_slow_start_is_no_slow_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def stream() -> Iterator[int]:
        clock[0] += 2.0
        yield from range(8)

    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert first_batch(stream()).seconds == 0


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


def test_a_plan_counts_the_time_of_loading_which_workers_do_while_a_measured_step_runs() -> None:
    size = len(Blocks.batches()[0][0])
    loader = DataLoader(Samples(), batch_size=size)
    found: Plan = lightning_parallel.plan(Blocks(), loader, devices=2, device="h100")
    for row in found.found:
        expected = size * SLEPT / row.choice.data
        assert expected <= row.time.loading < 2 * expected, str(row.choice)
        assert row.seconds == row.time.total
    assert "without workers" in str(found)
    row = replace(found.best, waited=partial(Loaded(None, 8.0, 1).waited, replicas=1, speed=1.0))
    assert [replace(row, measured=Measured(each, 1)).seconds for each in (1.0, 10.0)] == [8.0, 10.0]
    assert "Data:" not in str(lightning_parallel.plan(Blocks(), next(iter(loader)), devices=2, device="h100"))


def test_fewer_samples_than_were_tried_take_no_less_each() -> None:
    two, eight = Cost(forward=10.0, backward=20.0, first=10.0, inner=4.0), Cost(forward=47.0, backward=95.0, first=46.0)
    one = Cost.mixed([two, eight], [7 / 6, -1 / 6])
    assert one.forward < 5 and one.backward < 10 and one.first < 5
    bounded = one.at_least(0.5, two)
    assert (bounded.forward, bounded.backward, bounded.first) == (5.0, 10.0, 5.0)
    assert bounded.inner == pytest.approx(4.0 * 7 / 6)  # bytes are as they were


# -- an optimizer's step ---------------------------------------------------------------------------------------------

HERE = torch.device("cpu")
DEVICE = Device("a CPU", 1e9, 1e9, 1e9, 0.0, 0.0, measured=True)


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("not on these")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 8))


def test_its_time_is_that_of_a_step() -> None:
    module = layers()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    before = [p.clone() for p in module.parameters()]
    updates = Updates(module, [optimizer], DEVICE, HERE)
    whole = updates.seconds(dict.fromkeys(dict(module.named_parameters()), 1.0), divided=False)
    part = updates.seconds({"0.weight": 1.0, "0.bias": 1.0}, divided=False)
    assert not optimizer.state and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    [measured] = seconds_of([optimizer.step], HERE)
    assert measured / 5 < whole < 5 * measured  # of less than a millisecond, on a machine that does other work too
    assert part < whole


def test_one_that_cannot_be_tried_takes_its_bytes() -> None:
    module = layers()
    updates = Updates(module, [Broken(module.parameters(), lr=0.1)], DEVICE, HERE)
    assert updates.seconds({"0.weight": 1.0}, divided=False) == pytest.approx(2 * DEVICE.passes(4 * 512 * 512 * 2))
