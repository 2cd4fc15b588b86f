"""Batches that replicas deal among themselves, from a loader that goes on where a checkpoint has stopped it."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lightning_parallel as lp


def dealt(trainer: L.Trainer, batches: int) -> lp.ResumableDataLoader:
    """Pairs of numbers below 12, in ``batches`` batches of 8 over all replicas."""
    x = torch.arange(8 * batches) % 12
    kwargs = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    sampler: DistributedSampler = DistributedSampler(x, **kwargs)  # type: ignore[arg-type]
    data = TensorDataset(x, x * 5 % 12)
    return lp.ResumableDataLoader(data, batch_size=8 // kwargs["num_replicas"], sampler=sampler)
