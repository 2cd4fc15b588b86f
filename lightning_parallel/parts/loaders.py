"""Data loaders: different replicas must get different samples, and the ranks of one replica the same ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.batch import fingerprint
from lightning_parallel.collectives import guarded
from lightning_parallel.layout import Layout
from lightning_parallel.lightning_private.replaced import replaced

_DATA_HOOKS = ("setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def data_hooks_inside(
    owners: Sequence[pl.LightningModule | pl.LightningDataModule | None],
    context: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Have the owners' own hooks that set up data and make loaders run inside a context. Returns a function that ends
    this."""
    put_back = ExitStack()

    def inside(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    for owner, name in product(filter(None, owners), _DATA_HOOKS):
        hook = getattr(owner, name)
        if hook is not None:  # `module.val_dataloader = None` switches it off
            put_back.callback(replaced(owner, name, partial(inside, hook)))
    return put_back.close


def prepare(dataloader: object, layout: Layout) -> object:
    """A loader as this rank uses it, with its workers seeded by replica. If it gives all replicas the same samples, a
    warning says so."""
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if layout.size("data") > 1:
        warn_of_equal_shares(dataloader, layout.size("data"))
    # Lightning seeds workers by global rank, which would give the stages of one replica different augmentations.
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=layout.index("data"))
    return dataloader


def warn_of_equal_shares(dataloader: DataLoader[Any], replicas: int) -> None:
    """Warn of a loader that doesn't divide its samples over the replicas, after Lightning has done what it can."""
    if isinstance(dataloader.dataset, IterableDataset):
        rank_zero_warn(
            f"{type(dataloader.dataset).__name__} is an iterable dataset: each of the {replicas} replicas iterates it "
            f"by itself. Unless it selects its samples by trainer.strategy.layout.index('data'), all replicas train "
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


def check_same_batch(batch: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group``, which hold one copy of the model together, have the same first batch. Data
    shuffled differently on each would train nonsense.

    Raises:
        RuntimeError: the batches differ, on all ranks.
    """
    number = fingerprint(batch)
    both = torch.tensor([number, -number], device=device)
    guarded(dist.all_reduce, both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both.tolist()
    if highest != -lowest:
        raise RuntimeError(
            "The ranks of one replica see different batches: their first ones differ. Every stage and every tensor "
            "rank must load the same samples in the same order: seed the sampler with `seed_everything(...)` or a "
            "generator of its own, or leave `use_distributed_sampler=True`."
        )
