"""The ranks as steps see them, and the collectives that Lightning and the user's code call through the strategy.

A step computes what one process, or a replica of DDP, would. So inside it the ranks are those of the data axis, on all
stages and tensor ranks of a replica alike: ``trainer.world_size``, ``global_rank``, and torch.distributed's default
group, over which the collectives run that a step calls. ``local_rank`` stays what it is, since it picks the device::

    4 processes: 2 stages x 2 replicas    outside a step         inside
    trainer.world_size                    4                      2
    trainer.global_rank                   0, 1 | 2, 3            0, 1 | 0, 1
    dist.all_reduce(x)                    over all               over the replicas of this stage

The hooks that set up data and make loaders see these ranks, too: a batch size is divided by the number of replicas. In
``setup`` all ranks may wait for each other, so torch.distributed's default group there has all of them.

Outside, decisions, barriers and broadcasts are for all ranks; ``self.all_gather`` and ``sync_dist=True`` always run
over the data axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.private.torch.groups import default_group, silent_group_of
from lightning_parallel.ranks.collectives import broadcast_object, guarded, reduce_tensor
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout

T = TypeVar("T")


class Collectives:
    """The collectives of a strategy. ``inside`` is the name of the step, or other part of the user's code, that is
    running and sees the ranks of the data axis; None outside."""

    def __init__(self, layout: Layout, groups: Groups, device: torch.device) -> None:
        self.groups = groups
        self._layout = layout
        self._replicas = groups.along("data")
        self._device = device
        self._is_trial = False
        self._is_data_hook = False
        self.inside: str | None = None

    @property
    def counts_replicas(self) -> bool:
        """Does the user's code that is running see the ranks of the data axis?"""
        return self.inside is not None or self._is_data_hook

    @contextmanager
    def inside_data_hook(self, name: str) -> Iterator[None]:
        """Inside, the ranks are those of the data axis. In ``setup`` torch.distributed's default group has all ranks;
        in a hook that makes loaders the data axis's, since a ``DistributedSampler(dataset)`` asks it."""
        before, self._is_data_hook = self._is_data_hook, True
        try:
            with nullcontext() if name == "setup" else default_group(self._replicas):
                yield
        finally:
            self._is_data_hook = before

    @contextmanager
    def inside_step(self, name: str) -> Iterator[None]:
        """Inside, the ranks are those of the data axis. ``name`` is what runs, for errors."""
        if self._is_trial:  # of which this is a part
            yield
            return
        before, self.inside = self.inside, name
        try:
            with default_group(self._replicas):
                yield
        finally:
            self.inside = before

    @contextmanager
    def inside_trial(self) -> Iterator[None]:
        """Like :meth:`inside_step` for a trial of a step, in which ranks don't meet: one of them may run it alone."""
        before = self.inside, self._is_trial
        self.inside, self._is_trial = "the step", True
        try:
            with default_group(silent_group_of(sorted(self._layout.peers("data")))):
                yield
        finally:
            self.inside, self._is_trial = before

    def meet(self, what: str) -> None:
        """Check that all ranks can meet now.

        Raises:
            RuntimeError: inside a step they can't: a stage that has left it would be missing.
        """
        if self.inside is not None and self._layout.size("data") < self._layout.world_size:
            raise RuntimeError(
                f"{what} needs every rank, but {self.inside} runs among the replicas of a pipeline stage or tensor "
                f"rank: others may have left it, or don't run it. Do this in on_train_batch_end, or in a callback."
            )

    # -- all ranks; inside a step, the replicas ------------------------------------------------------------------

    def barrier(self) -> None:
        # The group isn't bound to a device, so NCCL would have to guess this rank's.
        guarded(dist.barrier, device_ids=[self._device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, value: T, source: int) -> T:
        if self._is_trial:
            return value
        return broadcast_object(value, source, None)

    def decide(self, decision: bool, all: bool) -> bool:
        """A decision of all ranks together: True if all of them say so, or if any does."""
        if self._is_trial:
            return decision
        votes = torch.tensor(int(decision), device=self._device)
        guarded(dist.all_reduce, votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)

    # -- replicas ------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any | None, operation: Any) -> Any:
        """Reduce over the replicas (or ``group``)."""
        group = self.replicas_or(group)
        return tensor if group is None or not isinstance(tensor, Tensor) else reduce_tensor(tensor, group, operation)

    def replicas_or(self, group: Any | None) -> Any | None:
        """The group given. If none is given, or the world, which ``LightningModule.all_gather`` passes when the user
        gives none, it is that of the replicas. None for this rank alone."""
        if group is not None and group is not dist.group.WORLD:
            return group
        if self._layout.size("data") == 1:
            return None
        return dist.group.WORLD if self._is_trial else self._replicas
