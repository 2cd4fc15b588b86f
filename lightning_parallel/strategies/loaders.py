"""Data loaders that give replicas the same samples, though nobody said so."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


def warn_of_equal_shares(dataloader: DataLoader[Any], replicas: int) -> None:
    """Warn of a loader that, with Lightning's own help given, doesn't share its samples out over the replicas."""
    if isinstance(dataloader.dataset, IterableDataset):
        rank_zero_warn(
            f"{type(dataloader.dataset).__name__} is an iterable dataset: each of the {replicas} replicas iterates it "
            f"by itself. Unless it yields every replica another share, by trainer.strategy.layout.data_rank, all train "
            f"on the same samples."
        )
    elif not _is_distributed(dataloader):
        rank_zero_warn(
            f"The sampler {type(dataloader.sampler).__name__} isn't distributed: all {replicas} replicas draw from all "
            f"samples. Use DistributedSampler(dataset, **trainer.distributed_sampler_kwargs), or leave "
            f"use_distributed_sampler=True."
        )


def _is_distributed(dataloader: DataLoader[Any]) -> bool:
    samplers = (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)
