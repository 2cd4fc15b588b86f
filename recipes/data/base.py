"""Loaders whose order depends on the seed and the epoch alone, whatever the layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_parallel import ResumableDataLoader

HELD_OUT = 20  # one part in so many is for validation, and as much again for test


class SeededData(L.LightningDataModule):
    """Base of the example data.

    Replicas take equal shares of the same shuffled list. So one process, DDP over n processes and a pipeline see the
    same samples at the same step, and their losses can be compared. Lightning would shuffle in another order with one
    process than with several; therefore the loaders bring a sampler of their own, a DistributedSampler, which it leaves
    as it is. A last batch that is not full is left out of training.

    Args:
        batch_size: samples per batch, over all replicas.
        workers: loader processes per rank; 0 loads in the training process.
        seed: of the order of the training samples.

    Attributes:
        fingerprint: what tells this data from other data, for the record of a run. Known after ``setup``.
    """

    fingerprint: str
    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]

    def __init__(self, batch_size: int, workers: int, seed: int) -> None:
        super().__init__()
        self.batch_size, self.workers, self.seed = batch_size, workers, seed

    def _replica(self) -> tuple[int, int]:
        """(data-parallel replicas, which one this rank feeds). The ranks of a pipeline share a replica."""
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (sampler["num_replicas"], sampler["rank"]) if sampler else (1, 0)

    def _loader(self, dataset: Dataset[Any], *, train: bool) -> DataLoader[Any]:
        replicas, rank = self._replica()
        if self.batch_size % replicas:
            raise ValueError(
                f"data.batch_size={self.batch_size} cannot be shared equally by {replicas} replicas: "
                f"use a multiple of {replicas}"
            )
        samples = len(dataset)  # type: ignore[arg-type]  # all of ours have a length
        if train and samples < self.batch_size:
            raise ValueError(
                f"data.batch_size={self.batch_size} is more than the {samples} training samples: "
                "use a smaller one or more data"
            )
        order = {"num_replicas": replicas, "rank": rank, "shuffle": train, "seed": self.seed, "drop_last": train}
        sampler = self._sampler(dataset, order)
        loader = ResumableDataLoader if train else DataLoader
        return loader(
            dataset,
            batch_size=self.batch_size // replicas,
            sampler=sampler,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.workers > 0,
            drop_last=train,
        )

    def _sampler(self, dataset: Dataset[Any], order: dict[str, Any]) -> DistributedSampler[Any]:
        return DistributedSampler(dataset, **order)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_set, train=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_set, train=False)
