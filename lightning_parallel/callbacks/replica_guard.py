"""Ends the run when copies that should be equal have parted: a bit has flipped, or a rank has computed wrongly.

Replicas hold the same parameters and the same optimizer state. Tensor ranks hold the same of what isn't divided, stages
of what is tied. A flipped bit stays in one copy, and its gradients spoil all others, without a sign in the loss::

    update            100        200        250                  300
    rank 0            17 4 9     21 8 3                          52 6 1
    rank 1            17 4 9     21 8 3     a bit flips          52 6 7
                                                                 error, on all ranks; nothing is saved

Each rank sends a few numbers, one for all that it holds in common with the same other ranks. Only where these differ,
tensors are compared one by one.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.tensors import tensors_in
from lightning_parallel.ranks.collectives import Group, gather_objects, highest
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.local_model import LocalModel, local_part, memory_of
from lightning_parallel.ranks.notice import Notice
from lightning_parallel.ranks.writes import digest_of_all
from lightning_parallel.values import first_few

_EVERY = 10  # batches between two looks at the notice of an asynchronous pipeline
_ABOVE = 2**62  # all numbers that ranks compare
_Place = tuple[Any, ...]  # copies of one tensor have the same one


class ReplicaGuard(Callback):
    """Compares the bits of parameters and of the optimizer state with those of their copies on other ranks: before each
    checkpoint, at the end of training, and every so many updates. Where they differ, all ranks raise the same
    ``RuntimeError``. It names the tensor, the rank that differs from most others, and that rank's host; of two copies
    it names both. The checkpoint isn't written, so that the last one is good.

    It works under the strategies of this package and under ``strategy="ddp"``. Buffers aren't compared: those of
    BatchNorm differ by design. In an asynchronous pipeline the error comes some batches late.

    Args:
        every: the number of updates from one comparison to the next.

    Raises:
        ValueError: ``every`` is less than 1. Before training: the strategy isn't one of those above.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give a number of updates of at least 1.")
        self.every = every
        self._copies: _Copies | None = None
        self._notice: Notice | None = None
        self._put_back: Callable[[], None] = lambda: None
        self._compared_at = 0  # update
        self._seen = ""  # what differs on this stage of an asynchronous pipeline
        self._error = ""  # that has ended the run

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1 or self._copies is not None:  # the latter: in a learning-rate finder, within a run
            return
        self._put_back()
        self._seen = self._error = ""
        self._compared_at, strategy = trainer.global_step, trainer.strategy
        ahead = getattr(strategy, "batches_ahead", 0)
        self._copies = _Copies.of(trainer, pl_module, waits=not ahead)
        self._notice = Notice(ahead) if ahead else None
        self._put_back = replaced(strategy, "save_checkpoint", partial(self._save, trainer, strategy.save_checkpoint))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._copies is None:
            return
        update, number = trainer.global_step, trainer.fit_loop.total_batch_idx + 1
        if update // self.every > self._compared_at // self.every:
            self._compared_at = update
            self._seen = self._seen or self._copies.differing(trainer, self._copies.near)
        if self._notice is None:
            self._end_if(trainer, self._seen)
        elif number % _EVERY == 0 and self._notice.at(number, int(bool(self._seen))):
            trainer.strategy.drain()  # type: ignore[attr-defined]  # or others would wait for what is in flight
            self._end_if(trainer, next(filter(None, gather_objects(self._seen, None))))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare once more. The end of the epoch has drained an asynchronous pipeline."""
        if self._copies is not None:
            self._end_if(trainer, self._copies.differing(trainer, self._copies.everyone))

    def _save(self, trainer: pl.Trainer, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._error:  # the other ranks have left, too
            raise RuntimeError(self._error)
        if self._copies is not None:
            self._end_if(trainer, self._copies.differing(trainer, self._copies.everyone))
        save(*args, **kwargs)

    def _end_if(self, trainer: pl.Trainer, differs: str) -> None:
        if not differs:
            return
        self._error = differs
        if not isinstance(trainer.strategy, DDPStrategy):  # unequal learning rates explain it: no bit has flipped
            trainer.strategy.refuse_parted_options()  # type: ignore[attr-defined]
        raise RuntimeError(differs)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._copies = None  # a callback that saves now may be alone
        if not self._error:
            self._put_back()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()
        self._copies = self._notice = None


@dataclass(frozen=True)
class _Copies:
    """What this rank holds, and where else there are copies of it.

    Attributes:
        local: the parameters here.
        layout: which rank this is; None under DDP, where all ranks hold the same.
        everyone: the group of all ranks.
        near: those that are compared between two batches: of an asynchronous pipeline one stage's, else all.
        tied: names of parameters that several stages hold.
        owned: names of those whose optimizer state one rank has.
        places: those of all ranks, in one order.
    """

    local: LocalModel
    layout: Layout | None = None
    everyone: Group = None
    near: Group = None
    tied: frozenset[str] = frozenset()
    owned: frozenset[str] = frozenset()
    places: tuple[_Place, ...] = ((),)

    @classmethod
    def of(cls, trainer: pl.Trainer, module: pl.LightningModule, *, waits: bool) -> _Copies:
        """All ranks call it. ``waits``: do stages wait for each other?"""
        strategy: Any = trainer.strategy
        if isinstance(strategy, DDPStrategy):
            return cls(LocalModel.of(module))
        if not isinstance(layout := getattr(strategy, "layout", None), Layout):
            raise ValueError(
                f"ReplicaGuard doesn't know which parameters {type(strategy).__name__} copies. Use it with strategies "
                f"of lightning_parallel or with strategy='ddp'."
            )
        local, ranks = strategy.local_model, layout.everyone()
        near = [each.rank for each in ranks if waits or each.stage == layout.stage]
        stages = gather_objects([*local.parameters], strategy.groups.host_group)
        counts = Counter(name for names in stages for name in names)
        tied = frozenset(name for name, count in counts.items() if count > 1)
        on_host = strategy.groups.on_host
        owned = frozenset(strategy.owned)
        copies = cls(local, layout, on_host(each.rank for each in ranks), on_host(near), tied, owned)
        own = {copies._place(name, parameter) for name, parameter in local.parameters.items()}
        places = set().union(*gather_objects(own, copies.everyone))
        return replace(copies, places=tuple(sorted(places, key=repr)))

    def differing(self, trainer: pl.Trainer, group: Group) -> str:
        """What differs, in words; empty if nothing does. All ranks of the group call it, and get the same."""
        held: dict[_Place, dict[str, list[Tensor]]] = {}
        for name, parameter in self.local.parameters.items():
            optimizers = [] if name in self.owned else trainer.optimizers
            held.setdefault(self._place(name, parameter), {}).update(_tensors_of(name, parameter, optimizers))
        numbers = {place: hash(digest_of_all(chain(*parts.values()))) % _ABOVE for place, parts in held.items()}
        signed = (sign * numbers[place] if place in numbers else -_ABOVE for sign in (1, -1) for place in self.places)
        largest = highest(group, *signed)
        smallest = [-number for number in largest[len(self.places) :]]
        wrong = {place for place, low, high in zip(self.places, smallest, largest, strict=False) if low < high}
        if not wrong:
            return ""
        one_by_one = {
            (place, what): digest_of_all(tensors)
            for place in wrong & held.keys()
            for what, tensors in held[place].items()
        }
        rank = trainer.global_rank
        named = f"rank {rank}" if self.layout is None else self.layout.describe(rank)
        named += f" of host {socket.gethostname()}"
        return _said(gather_objects(named, group), gather_objects(one_by_one, group), trainer.global_step)

    def _place(self, name: str, parameter: Tensor) -> _Place:
        if self.layout is None:
            return ()
        return (
            name if name in self.tied else self.layout.stage,
            self.layout.index("tensor") if name in self.local.shards else None,
            self.layout.index("data") if isinstance(parameter, DTensor) else None,
        )


def _tensors_of(name: str, parameter: Tensor, optimizers: Iterable[Optimizer]) -> dict[str, list[Tensor]]:
    """A parameter and its state in some optimizers, as they lie in memory."""
    states = [
        optimizer.state.get(parameter, {})
        for optimizer in optimizers
        if not isinstance(optimizer, ZeroRedundancyOptimizer)  # whose state is on one rank
    ]
    tensors = tensors_in([[state[key] for key in sorted(state, key=str)] for state in states])
    return {
        name: [local_part(parameter)],
        f"optimizer state of {name}": [local_part(tensor) for tensor in tensors if memory_of(tensor)],
    }


def _said(ranks: Sequence[str], numbers: Iterable[Mapping[Any, object]], update: int) -> str:
    holders: dict[Any, dict[object, list[int]]] = {}  # of each number, by tensor
    for rank, here in enumerate(numbers):
        for tensor, number in here.items():
            holders.setdefault(tensor, {}).setdefault(number, []).append(rank)
    unequal = {tensor: sorted(copies.values(), key=len) for tensor, copies in holders.items() if len(copies) > 1}
    *others, most = next(iter(unequal.values()))
    is_known = len(others[-1]) < len(most)
    blamed = [ranks[rank] for copies in (others if is_known else [*others, most]) for rank in copies]
    against = f"unlike {len(most)} other ranks" if is_known else "and no majority tells which are right"
    return (
        f"Copies of {first_few([repr(what) for _, what in unequal])} differ after update {update}: on "
        f"{first_few(blamed)}, {against}. A bit has flipped in memory, or a rank computes wrongly. Nothing is saved. "
        f"Go on from the last checkpoint, which was compared before, and leave out a host that is named again."
    )
