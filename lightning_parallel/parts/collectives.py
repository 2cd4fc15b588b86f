"""What Lightning and the user's code ask ranks to do together, through the strategy.

``self.all_gather`` and ``sync_dist=True`` run over the data axis, whose ranks see different batches. Decisions,
barriers and broadcasts are for all ranks. Code that runs on one pipeline stage only can't meet the other ranks: a
collective there is refused before any rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives import guarded, reduce_tensor
from lightning_parallel.groups import Groups
from lightning_parallel.layout import Layout

T = TypeVar("T")


class Collectives:
    """The collectives of a strategy.

    Args:
        layout: the ranks.
        groups: their process groups.
        device: of this rank.
    """

    def __init__(self, layout: Layout, groups: Groups, device: torch.device) -> None:
        self._layout = layout
        self._replicas = groups.along("data")
        self._device = device
        self._alone_in: str | None = None

    @contextmanager
    def refused_in(self, hook: str) -> Iterator[None]:
        """Inside, code runs that reaches its end on the last stage only: no other rank can be met.

        Args:
            hook: what runs, for errors.
        """
        self._alone_in = hook
        try:
            yield
        finally:
            self._alone_in = None

    def meet(self, what: str) -> None:
        """All ranks are about to meet.

        Raises:
            RuntimeError: they can't.
        """
        if self._alone_in is not None and self._layout.stages > 1:
            last = self._layout.rank_at(pipeline=self._layout.stages - 1)
            raise RuntimeError(
                f"{what} needs every rank, but {self._alone_in} reaches its end on the last pipeline stage only (rank "
                f"{last}): what it works on exists there alone. Do this in on_train_batch_end, or in a callback."
            )

    # -- all ranks -----------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.meet("A barrier")
        # The group isn't bound to a device, so NCCL would have to guess this rank's.
        guarded(dist.barrier, device_ids=[self._device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, value: T, source: int) -> T:
        if self._alone_in is not None and source == self._layout.rank:
            return value  # trainer.log_dir asks for one
        self.meet("A broadcast")
        boxed = [value]
        guarded(dist.broadcast_object_list, boxed, source)
        return boxed[0]

    def decide(self, decision: bool, all: bool) -> bool:
        """What the ranks decide together: True if all of them do, or if any does."""
        self.meet("A decision of all ranks")
        votes = torch.tensor(int(decision), device=self._device)
        guarded(dist.all_reduce, votes)
        return bool(votes == self._layout.world_size) if all else bool(votes)

    # -- replicas ------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any | None, operation: Any) -> Any:
        """Reduce over the replicas (or ``group``)."""
        group = self._replicas_or(group)
        return tensor if group is None or not isinstance(tensor, Tensor) else reduce_tensor(tensor, group, operation)

    def all_gather(self, tensor: Tensor, group: Any | None, gather: Callable[[Any], Tensor]) -> Tensor:
        """Gather over the replicas (or ``group``). With one replica the tensor is returned as it is, as in one process.

        Args:
            tensor: of this rank.
            group: as the user gave it.
            gather: gathers over a group.
        """
        group = self._replicas_or(group)
        return tensor if group is None else gather(group)

    def _replicas_or(self, group: Any | None) -> Any | None:
        """The group given, or the replicas' if none is given, or the world, which ``LightningModule.all_gather`` passes
        when the user gives none. None for this rank alone."""
        if group is not None and group is not dist.group.WORLD:
            return group
        return self._replicas if self._layout.size("data") > 1 else None
