"""Data loaders: different replicas must get different samples, and the ranks of one replica the same ones."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.batch import fingerprint
from lightning_parallel.private.lightning.batches import read_by_loop
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.ranks.collectives import Group, all_alike, broadcast_object, gather_objects, highest
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.user_collectives import Collectives
from lightning_parallel.seeding import random_state, restore_random_state

_KNOWN = ("torch", "lightning", "lightning_parallel")  # packages whose samplers are as long as they say
_DATA_HOOKS = ("setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def data_hooks_inside(
    owners: Sequence[pl.LightningModule | pl.LightningDataModule | None], collectives: Collectives
) -> Callable[[], None]:
    """Make ``setup`` and the hooks that make loaders see the ranks of the data axis. Returns a function that undoes
    this.

    Args:
        owners: the LightningModule and the LightningDataModule, if there is one.
    """
    put_back = ExitStack()

    def inside(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with collectives.inside_data_hook(name):
            return hook(*args, **kwargs)

    for owner, name in product(filter(None, owners), _DATA_HOOKS):
        hook = getattr(owner, name)
        if hook is not None:  # `module.val_dataloader = None` switches it off
            put_back.callback(replaced(owner, name, partial(inside, name, hook)))
    return put_back.close


def prepare(dataloader: object, layout: Layout) -> object:
    """A loader as this rank uses it, with its workers seeded by replica. If it doesn't divide its samples over the
    replicas, after Lightning has done what it can, a warning says so."""
    if not isinstance(dataloader, DataLoader):
        return dataloader
    replicas = layout.size("data")
    samplers = (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None))
    if replicas > 1 and isinstance(dataloader.dataset, IterableDataset):
        rank_zero_warn(
            f"{type(dataloader.dataset).__name__} is an iterable dataset: each of the {replicas} replicas iterates it "
            f"by itself. Unless it selects its samples by trainer.strategy.layout.index('data'), all replicas train "
            f"on the same samples."
        )
    elif replicas > 1 and not any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        rank_zero_warn(
            f"The sampler {type(dataloader.sampler).__name__} isn't distributed: all {replicas} replicas draw from all "
            f"samples. Use DistributedSampler(dataset, **trainer.distributed_sampler_kwargs), or leave "
            f"use_distributed_sampler=True."
        )
    # Lightning seeds workers by global rank, which would give the stages of one replica different augmentations.
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=layout.index("data"))
    return dataloader


def with_one_worker(loader: Any) -> Any:
    """A copy of a loader, with one worker if that has several. Workers that it has started stay its own."""
    own = copy.copy(loader)
    own.num_workers = min(1, loader.num_workers)
    object.__setattr__(own, "persistent_workers", False)  # a DataLoader refuses it, since its workers may run
    return own


def refuse_unequal_steps(run: Run, kind: str, batches: Sequence[float]) -> None:
    """Refuse loaders that have more batches on one replica than on another, since replicas take their steps together.
    All replicas call it before their first step.

    Args:
        kind: as in ``limit_{kind}_batches``.
        batches: for each loader their number, infinite where it isn't known.

    Raises:
        ValueError: on all replicas.
    """
    for loader, fewest, most in _unequal(batches, run.groups.along("data")):
        raise ValueError(
            f"Of loader {loader} one replica has {fewest:.0f} batches, and another one {most:.0f}, but they take their "
            f"steps together. Leave use_distributed_sampler=True, give samplers equal lengths, take another batch "
            f"size, or set limit_{kind}_batches={fewest:.0f}."
        )


def refuse_end_of_some(run: Run, doubtful: Container[int], *, ended: bool = False) -> None:
    """Refuse loaders of which one replica's ends before another's. The other replica would wait in the next batch. All
    replicas call it before each batch, and where the loaders have ``ended``. Lightning may not have foreseen it: a
    length may be wrong, or only a limit.

    Args:
        doubtful: the ids of loaders that :func:`may_end_early`.

    Raises:
        RuntimeError: on all replicas.
    """
    given, begun, is_last = read_by_loop(run.trainer)
    if run.layout.size("data") == 1 or not any(id(loader) in doubtful for loader in given):
        return
    known = begun if ended or is_last else begun + 1
    replicas = run.groups.on_host(run.layout.peers("data"))  # or each batch would wait for the GPU
    most, least = highest(replicas, known, -known)
    if most != -least:
        run.collectives.barrier()  # one that left before would seem to be lost
        stage: Any = run.trainer.state.stage
        raise RuntimeError(
            f"One replica's loader ends with batch {-least - 1}, and another's doesn't, but they take their steps "
            f"together. Give all replicas equally many batches, or set "
            f"limit_{stage.dataloader_prefix}_batches={-least}."
        )


def may_end_early(loader: object) -> bool:
    """May the loader that a rank has here give fewer batches than its ``len``, or has it none? All ranks call it.

    Raises:
        ValueError: on all ranks, if it has a length on some of them only. Lightning compares lengths, and would wait.
    """
    has_length = sized_len(loader) is not None
    may, some, others = highest(None, int(not _has_its_length(loader)), int(has_length), int(not has_length))
    if some and others:
        raise ValueError(
            f"A loader has a length on some ranks, and none on others (here it is a {type(loader).__name__}, "
            f"{'with' if has_length else 'without'} one). Give all ranks loaders and datasets of the same kind."
        )
    return bool(may)


def _has_its_length(loader: Any) -> bool:
    """Does a loader surely give as many batches as its ``len``? Code of the user's may err."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    parts = (loader, loader.sampler, loader.batch_sampler)
    return all(type(part).__module__.split(".")[0] in _KNOWN for part in parts)


def _unequal(batches: Sequence[float], group: Group) -> Iterator[tuple[int, float, float]]:
    """The loaders of which ranks have unequal numbers of batches, with the fewest and the most. All ranks of the group
    call it."""
    for loader, counts in enumerate(zip(*gather_objects([*batches], group), strict=True)):
        known = {count for count in counts if math.isfinite(count)}
        if len(known) > 1:
            yield loader, min(known), max(known)


class SameBatches:
    """Keeps the batches of the ranks of one replica the same, which hold one copy of the model together.

    Samplers and augmentations draw from the global generators, and each rank has its own. Code that runs on one rank
    only (``if trainer.is_global_zero: torch.randn(4)``) advances that rank's generators only, and stages that draw for
    their own parameters advance theirs differently. So before each epoch all ranks get the generators of the replica's
    first rank, and before the first epoch's iterator is made, which seeds its workers. In the first replica this is
    global rank 0, which has drawn what one process draws. If batches differ all the same, the run would train nonsense.
    So ranks compare their first batch, and batches 0, 1, 2, 4, 8, ... of each epoch and of each evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_checked = False
        self._evaluated = 0  # batches of this evaluation
        hook = partial(self._begin, run.module.on_train_epoch_start)
        self.end = replaced(run.module, "on_train_epoch_start", hook)  # gives the module back its own hook

    def _begin(self, hook: Callable[[], None] | None) -> None:
        if hook is not None:  # None switches it off
            hook()  # the last one that Lightning calls before the loaders draw
        self.agree()

    def agree(self) -> None:
        """Give all ranks of the replica the generators of its first one. All of them call it."""
        group = self._run.groups.model
        if group.size() > 1:
            restore_random_state(broadcast_object(random_state(), None, group))

    def check(self, batch: Any, index: int) -> bool:
        """Called with each training batch and its index in the epoch. Returns whether ranks compare what they have at
        this batch.

        Raises:
            RuntimeError: the ranks' batches differ, on all ranks.
        """
        # Within an epoch, a rank that may be ahead doesn't wait for the others.
        meets = not self._has_checked or index == 0 or (index.bit_count() == 1 and not self._run.ahead())
        if meets:
            self._has_checked = True
            self._compare(batch, index)
        return meets

    def begin_evaluation(self, batches: Sequence[float]) -> None:
        """Called before an evaluation's first batch. All ranks of the replica call it. Loaders with workers have drawn
        their order by then.

        Args:
            batches: for each loader their number, infinite where it isn't known.

        Raises:
            RuntimeError: a loader has more batches on one of the ranks, on all of them.
        """
        self._evaluated = 0
        self.agree()
        for loader, fewest, most in _unequal(batches, self._run.groups.model):
            raise RuntimeError(
                f"The ranks of one replica see different batches: of loader {loader} one has {fewest:.0f}, and another "
                f"one {most:.0f}. Every stage and every tensor rank must load the same samples in the same order."
            )

    def check_evaluation(self, batch: Any) -> None:
        """Called with each batch of an evaluation. Raises as :meth:`check` does."""
        index, self._evaluated = self._evaluated, self._evaluated + 1
        if index.bit_count() <= 1:
            self._compare(batch, index)

    def _compare(self, batch: Any, index: int) -> None:
        if self._run.groups.model.size() > 1 and not all_alike(self._run.groups.model, fingerprint(batch)):
            raise RuntimeError(
                f"The ranks of one replica see different batches: their batches {index} differ. Every stage and every "
                f"tensor rank must load the same samples in the same order. Seed the sampler with "
                f"`seed_everything(...)` or a generator of its own, or leave `use_distributed_sampler=True`. Code that "
                f"runs on some ranks only (`if trainer.is_global_zero:`) mustn't draw from the generators that the "
                f"data are drawn from."
            )
