"""Loaders that would give every replica the same samples are warned of, once and on rank 0."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.pool import WorkerPool
from tests.strategies.harness import make_trainer
from tests.strategies.models import LeNet, Rows


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(LeNet.samples())


def warnings_of(loader: str) -> list[str]:
    made = {
        "iterable": DataLoader(Endless(), batch_size=4),
        "own sampler": DataLoader(Rows(LeNet.samples()), batch_size=4, sampler=RandomSampler(LeNet.samples())),
        "distributed": LeNet.loader(),
    }
    trainer = make_trainer("sync", [], {"stages": 1}, max_epochs=1, use_distributed_sampler=loader != "own sampler")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(LeNet(), made[loader])
    return [str(w.message) for w in caught if "replicas" in str(w.message)]


@pytest.mark.parametrize(("loader", "words"), [
    ("iterable", ["Endless", "layout.index('data')"]), ("own sampler", ["RandomSampler", "DistributedSampler"]),
    ("distributed", None),
])  # fmt: skip
def test_replicas_that_would_train_on_the_same_samples_are_warned_of(
    pool: WorkerPool, loader: str, words: list[str] | None
) -> None:
    told, other = pool.run(warnings_of, 2, loader, init=False)
    assert other == []
    assert len(told) == (words is not None)
    assert all(word in told[0] for word in words or [])
