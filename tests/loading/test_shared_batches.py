"""``share_batches=True``: one rank of a replica reads the loaders, and all train as one process on what it has read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.pool import WorkerPool
from tests.strategies.failures import assert_refused
from tests.strategies.harness import complete, here, make_trainer

EXACT = 1e-10


class Net(L.LightningModule):
    """It notes what it draws beside its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.drawn: list[float] = []

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.layers(batch[0])
        return found

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn += [float(torch.rand(())), float(np.random.rand())]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def batch_by(draw: Callable[..., Any]) -> Any:
    return torch.from_numpy(draw((8, 4))), torch.from_numpy(draw((8, 2)))


class Drawing:
    """Other batches on each rank, and in each epoch. It keeps what it has given."""

    def __init__(self, length: int, sized: bool = True) -> None:
        self.length, self.given = length, list[Any]()
        if sized:
            self.__class__ = type("Sized", (Drawing,), {"__len__": lambda self: self.length})

    def __iter__(self) -> Iterator[Any]:
        own = np.random.default_rng()
        for _ in range(self.length):
            self.given.append(batch_by(own.standard_normal))
            yield self.given[-1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield batch_by(np.random.standard_normal)


def generator() -> Iterator[Any]:
    own = np.random.default_rng()
    for _ in range(5):
        yield batch_by(own.standard_normal)


class Found(NamedTuple):
    given: list[Any]
    validated: list[Any]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    drawn: list[float]


def fitted(strategy: str, options: dict[str, Any], train: Any, validate: Any, **more: Any) -> Found:
    torch.set_default_dtype(torch.float64)
    module = Net()
    L.seed_everything(1)
    trainer = make_trainer(strategy, [], options, **{"max_epochs": 2, **more})
    trainer.fit(module, train, validate)
    weights = {name: complete(p.detach()) for name, p in here(module).items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Found(getattr(train, "given", []), getattr(validate, "given", []), weights, metrics, module.drawn)


def shared(strategy: str, options: dict[str, Any], sized: bool) -> Found:
    options = {**options, "share_batches": True}
    return fitted(strategy, options, Drawing(5, sized), Drawing(2), num_sanity_val_steps=1)


def in_one_process(given: list[Any], validated: list[Any]) -> Found:
    torch.set_default_dtype(torch.float64)
    epochs = [given[:5], given[5:]]
    module = Net()
    module.train_dataloader = lambda: DataLoader(epochs.pop(0), batch_size=None)  # type: ignore[method-assign]
    module.val_dataloader = lambda: DataLoader(validated[-2:], batch_size=None)  # type: ignore[method-assign]
    L.seed_everything(1)
    trainer = make_trainer("single", [], {}, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Found([], [], {n: p.detach() for n, p in module.named_parameters()}, metrics, module.drawn)


@pytest.mark.parametrize(("ranks", "strategy", "options", "sized"), [
    (2, "sync", {"microbatches": 2}, True), (2, "sync", {"microbatches": 2, "schedule": "zbv"}, False),
    (2, "tensor", {}, True), (4, "sync", {"microbatches": 2, "stages": 2, "tensor_parallel": 2}, False),
])  # fmt: skip
def test_ranks_train_on_the_batches_of_the_first_one(
    pool: WorkerPool, ranks: int, strategy: str, options: dict[str, Any], sized: bool
) -> None:
    first, *others = pool.run(shared, ranks, strategy, options, sized, init=False)
    assert len(first.given) == 10
    assert all(not other.given and not other.validated for other in others)
    expected = pool.run(in_one_process, 1, first.given, first.validated, init=False)[0]
    for found in (first, *others):
        assert found.metrics == pytest.approx(expected.metrics, rel=EXACT)
        assert found.drawn == first.drawn
        for name, weight in found.weights.items():
            if weight.shape == expected.weights[name].shape:
                torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=EXACT)


def by_kind(kind: str, strategy: str) -> Found:
    loaders: dict[str, Callable[[], Any]] = {
        "stream": lambda: DataLoader(Stream(), batch_size=None),
        "workers": lambda: DataLoader(
            Stream(), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        ),
        "generator": generator,
        "shuffled": lambda: DataLoader(samples, batch_size=None, shuffle=True),
    }
    np.random.seed(0)
    samples: Any = [batch_by(np.random.standard_normal) for _ in range(4)]
    options = {} if strategy == "single" else {"share_batches": True, "microbatches": 2}
    return fitted(strategy, options, loaders[kind](), None)


@pytest.mark.parametrize("kind", ["stream", "workers", "shuffled"])
def test_loaders_give_what_they_give_in_one_process(pool: WorkerPool, kind: str) -> None:
    expected = pool.run(by_kind, 1, kind, "single", init=False)[0]
    for found in pool.run(by_kind, 2, kind, "sync", init=False):
        assert found.drawn == expected.drawn
        for name, weight in found.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=EXACT)


def test_a_generator_is_read_to_its_end(pool: WorkerPool) -> None:
    one, other = pool.run(by_kind, 2, "generator", "sync", init=False)
    assert one.weights.keys() != other.weights.keys()
    assert len(one.drawn) == len(other.drawn) == 10


def predicted() -> list[Any]:
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer("sync", [], {"share_batches": True})
    data = [(torch.full((4,), float(i)), torch.zeros(2)) for i in range(12)]
    found: Any = trainer.predict(Net(), DataLoader(data, batch_size=4))
    return [batch is not None for batch in found]


def test_predictions_are_those_of_each_loader(pool: WorkerPool) -> None:
    one, other = pool.run(predicted, 2, init=False)
    assert [one, other] == [[True] * 3, [False] * 3]  # those of the last stage


class Broken(Drawing):
    def __init__(self, after: int) -> None:
        super().__init__(5)
        self.__class__ = Broken
        self.after = after

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(Drawing(5)):
            if i == self.after:
                raise OSError("the disk is gone")
            yield batch


def broken(kind: str) -> None:
    locked = DataLoader([(threading.Lock(), torch.zeros(8, 4))], batch_size=None, collate_fn=lambda batch: batch)
    loaders: dict[str, Any] = {"at first": Broken(0), "later": Broken(2), "locks": locked}
    fitted("sync", {"microbatches": 2, "share_batches": True}, loaders[kind], None)


def test_what_cannot_be_read_or_sent_is_refused_before_training(pool: WorkerPool) -> None:
    failures = pool.run(broken, 2, "locks", init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["share_batches=True", "pickle"])
    for failure in pool.run(broken, 2, "at first", init=False, expect_errors=True):
        assert "the disk is gone" in failure


def test_nobody_waits_for_a_loader_that_fails(pool: WorkerPool) -> None:
    own, other = pool.run(broken, 2, "later", init=False, expect_errors=True)
    assert "the disk is gone" in own
    assert "PeerLostError" in other


class ByRank(IterableDataset[Any]):
    """Each rank that torch.distributed knows of reads a share."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for i in range(rank, 12, ranks):
            yield torch.full((4,), float(i)), torch.full((2,), 1.0 * i)


class Noting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["a"]
        return self._loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        each = batch.values() if isinstance(batch, dict) else [batch]
        self.seen += [x[:, 0].tolist() for x, _ in each]


def seen_by(kind: str, strategy: str, options: dict[str, Any]) -> list[list[float]]:
    torch.set_default_dtype(torch.float64)
    data = [(torch.full((4,), float(i)), torch.zeros(2)) for i in range(12)]
    shuffled = {name: DataLoader(data, batch_size=4, shuffle=True) for name in "ab"}
    module = Noting()
    L.seed_everything(1)
    loader: Any = DataLoader(ByRank(), batch_size=2) if kind == "by rank" else shuffled
    make_trainer(strategy, [], options, use_distributed_sampler=False).fit(module, loader)
    return module.seen


def test_a_stream_that_divides_by_ranks_sees_replicas(pool: WorkerPool) -> None:
    options = {"stages": 2, "data_parallel": 2, "microbatches": 2, "share_batches": True}
    ranks = pool.run(seen_by, 4, "by rank", "sync", options, init=False)
    epoch = [sorted(x for batch in seen[:3] for x in batch) for seen in ranks]
    assert [len(seen) for seen in ranks] == [6] * 4
    assert sorted(map(tuple, epoch)) == sorted([tuple(range(0, 12, 2)), tuple(range(1, 12, 2))] * 2)


def test_several_loaders_draw_as_in_one_process(pool: WorkerPool) -> None:
    (expected,) = pool.run(seen_by, 1, "several", "single", {}, init=False)
    for seen in pool.run(seen_by, 2, "several", "sync", {"microbatches": 2, "share_batches": True}, init=False):
        assert seen == expected


class OnOneRank(Net):
    """Its loader can be made on the first rank only, or has another length there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        is_first = os.environ["RANK"] == "0"
        if self.kind == "fails" and not is_first:
            raise OSError("no data here")
        return Drawing(4 if is_first else 2)


def fitted_on_one(kind: str) -> int:
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer("sync", [], {"microbatches": 2, "share_batches": True}, max_epochs=1)
    trainer.fit(OnOneRank(kind))
    return trainer.global_step


def test_the_first_rank_s_loader_counts(pool: WorkerPool) -> None:
    assert pool.run(fitted_on_one, 2, "longer", init=False) == [4, 4]


def test_a_loader_that_cannot_be_made_on_a_rank_is_reported_on_all(pool: WorkerPool) -> None:
    for failure in pool.run(fitted_on_one, 2, "fails", init=False, expect_errors=True):
        assert "no data here" in failure
