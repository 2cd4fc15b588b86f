"""Takes the module and the loaders that a package gives to its Trainer, for packages with an interface of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler


class _Taken(BaseException):
    """Ends the training. It is a BaseException, so that no package's `except Exception` catches it."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


def captured(train: Callable[[], Any]) -> tuple[L.LightningModule, dict[str, Any]]:
    """Run `train` up to its first `Trainer.fit`.

    Returns:
        The module, and the loaders by the names of arguments of `Trainer.fit`.

    Raises:
        RuntimeError: it calls none.
    """

    def fit(
        trainer: Any,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **_: Any,
    ) -> None:
        loaders = {"train_dataloaders": in_order(train_dataloaders), "val_dataloaders": val_dataloaders}
        raise _Taken({"model": model} | (loaders if datamodule is None else {"datamodule": datamodule}))

    try:
        with patch.object(L.Trainer, "fit", fit):
            train()
    except _Taken as taken:
        given = taken.given
        return given.pop("model"), given
    raise RuntimeError("no call of Trainer.fit")


def in_order(loader: Any) -> Any:
    """The same batches in each run: a loader that shuffles, without."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, RandomSampler):
        return loader
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, drop_last=loader.drop_last)


def shared(loader: Any, ranks: int, rank: int) -> Any:
    """A rank's share of one process's batches: the sampler that Lightning would put in shuffles. Other loaders than
    those of torch in order stay as they are."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, SequentialSampler) or not loader.batch_size:
        return loader
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, ranks, rank, shuffle=False)
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)
