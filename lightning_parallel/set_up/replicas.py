"""Replicas of the model along the data axis: equal at the start, with gradients averaged in each batch.

Each replica gets its share of every batch (samplers see to that). The gradients of a batch are averaged bucket by
bucket, during the last backward of the batch (:mod:`lightning_parallel.gradients.averaging`). With accumulation, the
averages of the batches are added up::

    batch 0 (accumulates)    forward  backward + average
    batch 1 (ends update)    forward  backward + average   step

The asynchronous pipeline averages once an update, within the update's last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.gradients.averaging import GradientAverager
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.losses.graph import Number
from lightning_parallel.ranks.collectives import all_alike, broadcast_tensors, highest
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.ranks.writes import digest
from lightning_parallel.tensor_lists import multiply
from lightning_parallel.values import first_few

_LOOKS = 2  # batches after which changed buffers are looked for: a mean that begins as a copy is the same after one


class Replicas:
    """This rank's replica of the model, among the others.

    Args:
        module: the whole model.
        group: the ranks that hold the same part in their replicas.
    """

    def __init__(self, local: LocalModel, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._local, self._group, self._module = local, group, module
        parts = module.named_modules()
        self._with_statistics = {name for name, part in parts if getattr(part, "track_running_stats", False)}
        self._carried: set[str] = set()  # the buffers that batches change, and may read
        self._before: dict[str, Tensor] = {}  # the digests of buffers before the last batch
        self._looks = _LOOKS
        self._first = dist.get_global_rank(group, 0)
        self.averager: GradientAverager | None = None  # of a training with several replicas
        self._factor: Callable[[], Number] = lambda: 1.0

    def copy_parameters(self) -> None:
        """Copy the first replica's parameters and buffers. So a script needs no seed for its initial weights."""
        broadcast_tensors(self._local.replicated.values(), self._first, self._group)
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Copy the first replica's buffers. Batches leave different values there (BatchNorm's statistics); wherever
        buffers are used or saved, the first replica's count."""
        broadcast_tensors(self._local.buffers().values(), self._first, self._group)

    def share_carried(self, *, begins_epoch: bool) -> None:
        """Before a batch, copy the first replica's buffers that batches have changed, such as a queue or a codebook:
        this batch may read them, and replicas would part. Changes are looked for after an epoch's first batches, and
        where an epoch begins. All replicas call it. BatchNorm's statistics are left out: training doesn't read them.

        Raises:
            ValueError: on all replicas, if one of these buffers hasn't the same size on all of them.
        """
        if begins_epoch:
            self._looks = _LOOKS
        is_due = self._looks >= 0
        # Most modules have no such buffer, and to find them all takes a walk over the module.
        if not (is_due or self._carried):
            return
        self._looks -= is_due
        own = {
            name: buffer
            for name, buffer in self._local.buffers().items()
            if name.rpartition(".")[0] not in self._with_statistics
        }
        if is_due and own:
            now = {name: digest(buffer) for name, buffer in own.items()}
            changed = [name in self._before and bool(self._before[name] != now[name]) for name in own]
            found = highest(self._group, *map(int, changed)) if self._before else []
            self._carried |= {name for name, has_changed in zip(own, found, strict=False) if has_changed}
            self._before = now
        carried = {name: own[name] for name in sorted(self._carried & own.keys())}
        sizes = [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in carried.items()]
        if sizes and not all_alike(self._group, sizes):
            raise ValueError(
                f"One of the buffers {first_few(map(repr, carried))} has another size on another replica. A buffer "
                f"that training changes is shared before each batch, as under DDP. Give it one size, or register it "
                f"with persistent=False: then each replica keeps its own."
            )
        broadcast_tensors(carried.values(), self._first, self._group)

    # -- gradients -----------------------------------------------------------------------------------------------

    def begin(self, until: ExitStack, *, watch: bool, factor: Callable[[], Number] = lambda: 1.0) -> None:
        """Begin training, which ends when the stack is closed.

        Args:
            watch: put hooks on the parameters that tell the averager of their gradients. Otherwise the caller does.
            factor: gives the number by which this replica's complete gradients are multiplied before they are averaged.

        Raises:
            ValueError: an embedding would make replicas differ, or has sparse gradients.
        """
        self._factor = factor
        if self._group.size() == 1:
            return
        _refuse_embeddings(self._module)
        self.averager = averager = GradientAverager(self._local.replicated, self._group, factor=factor)

        def grown(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            averager.ready(name, parameter.grad)

        for name, parameter in self._local.replicated.items() if watch else ():
            if parameter.requires_grad:
                until.callback(parameter.register_post_accumulate_grad_hook(partial(grown, name)).remove)

    def completing(self, names: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Inside, a backward completes a batch's gradients of these parameters, by default of all. They are averaged
        while it runs."""
        if self.averager is None:
            return nullcontext()
        return self.averager.completing(self._local.replicated.keys() if names is None else names)

    def averaged(self, gradients: Mapping[str, Tensor | None], names: Collection[str] | None = None) -> Gradients:
        """Multiply complete gradients by the factor that normalises the batch's loss, and average them over the
        replicas. All replicas call it. For fully sharded parameters the backward has done both. ``names``: the
        parameters, if it isn't all of them."""
        averager = self.averager
        if averager is None:
            multiply([g for name in self._local.replicated if (g := gradients.get(name)) is not None], self._factor())
            return {**gradients}
        if names is not None:
            own = {name: parameter for name, parameter in self._local.replicated.items() if name in names}
            averager = GradientAverager(own, self._group, factor=self._factor)
        return {**gradients, **averager.finish(gradients)}


def _refuse_embeddings(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.weight.requires_grad:
            continue
        if part.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm={part.max_norm:g}: each replica would scale only the rows that its own samples "
                f"look up, so replicas would differ. Scale all rows in on_train_batch_start, or use one replica."
            )
        if part.sparse:
            raise ValueError(f"'{name}' has sparse=True, but replicas average dense gradients: set sparse=False.")
