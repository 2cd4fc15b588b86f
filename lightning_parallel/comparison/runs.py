"""Trains copies of a module for a few batches: in one process, and under a layout.

All ranks get the first rank's batches, or shares of them, and its weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_parallel.batch import rebuilt, split
from lightning_parallel.comparison.evidence import SEED, Evidence, Witness
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.ranks.collectives import broadcast_object

T = TypeVar("T")


def first_batches(
    module: pl.LightningModule,
    data: pl.LightningDataModule | Iterable[Any] | None,
    count: int,
    common: Mapping[str, Any],
) -> list[Any]:
    """The first batches of a loader, as in one process."""
    found = [*itertools.islice(batches_of(loader_of(module, data, common)), count)]
    if not found:
        raise ValueError("data gives no batches.")
    return found


def loader_of(
    module: pl.LightningModule, data: pl.LightningDataModule | Iterable[Any] | None, common: Mapping[str, Any]
) -> Iterable[Any]:
    """The loader of a module's training, as in one process: ``data``, a datamodule's, or the module's own."""
    loader: Any = copy.deepcopy(module) if data is None else data
    if isinstance(loader, pl.LightningDataModule):
        loader = copy.copy(loader)  # each run sets one up
    if isinstance(loader, pl.LightningDataModule | pl.LightningModule):
        loader.trainer = trainer_of(devices=1, plugins=[_Alone()], **common)  # its hooks may read it
        loader.prepare_data()
        loader.setup("fit")
        loader = loader.train_dataloader()
        several = isinstance(loader, dict | list | tuple)
        if several and any(isinstance(each, DataLoader) for each in tree_leaves(loader)):
            return CombinedLoader(loader, "max_size_cycle")  # as a Trainer takes them
    return loader


def batches_of(loader: Iterable[Any]) -> Iterable[Any]:
    """A loader's batches, without the numbers that several loaders give with them."""
    return (each[0] for each in loader) if isinstance(loader, CombinedLoader) else loader


def trainer_of(*callbacks: Callback, **given: Any) -> pl.Trainer:
    """A Trainer of one epoch, which writes and shows nothing."""
    return pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # each rank is given its share
        callbacks=[*callbacks],
        **given,
    )


def train_in_one_process(
    module: pl.LightningModule,
    data: object,
    common: Mapping[str, Any],
    batches: Sequence[Any],
    strategy: Strategy | str = "auto",
    *watches: Callback,
    replicas: int = 1,
) -> Evidence:
    """What one process comes to. The share of each of so many replicas is a batch of its own."""
    if replicas > 1:
        batches = [share for batch in batches for share in split(batch, replicas)]
        common = {**common, "accumulate_grad_batches": replicas}
    shares, witness = Shares(batches), Witness()
    trainer = trainer_of(shares, witness, *watches, strategy=strategy, devices=1, plugins=[_Alone()], **common)
    backend = "nccl" if trainer.strategy.root_device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    fit(trainer, module, data, shares)
    found = witness.of_all_ranks[0]
    # Lightning divides the losses of batches by the number of those that it accumulates.
    found.losses = [sum(found.losses[k : k + replicas]) for k in range(0, len(found.losses), replicas)]
    found.batches = [batch // replicas for batch in found.batches]
    return found


class _Alone(LightningEnvironment):
    """One process, whatever the variables of torchrun or a cluster say."""

    @override
    def teardown(self) -> None:
        """Leave the variables: the next run may be under a layout."""


def fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: object,
    shares: Shares,
    ask: Callable[[], T | None] = lambda: None,
) -> T | None:
    """Train a copy. Returns what the first rank answers."""
    loader = DataLoader(shares, batch_size=None)
    datamodule = copy.copy(data) if isinstance(data, pl.LightningDataModule) else None
    if datamodule is not None:
        replaced(datamodule, "train_dataloader", lambda: loader)
        replaced(datamodule, "setup", partial(_seeded, datamodule.setup))  # it may divide the data at random
    try:
        trainer.fit(copy.deepcopy(module), None if datamodule else loader, datamodule=datamodule)
        return broadcast_object(ask(), None, None) if dist.is_initialized() else None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # the next run may be of another size


def _seeded(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    torch.manual_seed(SEED)
    function(*args, **kwargs)


class Shares(Callback, Dataset[Any]):
    """This rank's shares of the first rank's batches. A module that ranks have made of other random numbers gets the
    first rank's weights, too."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self._batches[index])  # a step may change its batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        own = [tensor.data for tensor in (*pl_module.parameters(), *pl_module.buffers())]
        self._batches, tensors = trainer.strategy.broadcast((self._batches, own))
        for tensor, of_first in zip(own, tensors, strict=True):
            tensor.copy_(of_first)
        torch.manual_seed(SEED)  # for configure_model, which comes next
        share = trainer.distributed_sampler_kwargs or {}
        if share.get("num_replicas", 1) > 1:
            own_of: dict[int, Any] = {}
            for batch in self._batches:
                if id(batch) not in own_of:
                    own_of[id(batch)] = rebuilt(split(batch, share["num_replicas"])[share["rank"]], _apart)
            self._batches = [own_of[id(batch)] for batch in self._batches]


def _apart(view: Tensor) -> Tensor:
    """A tensor without the rest of the memory in which it lies: deep copies of a view would copy that too."""
    made = copy.copy(view)
    made.data = view.data.clone()
    return made
