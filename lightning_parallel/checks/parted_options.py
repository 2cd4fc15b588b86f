"""Ends a run in which replicas go on with different learning rates: their weights would part unnoticed.

A scheduler that follows a value which each replica has for its own samples lowers the rate on one of them and not on
another::

    update        1     2     3            4                       8
    replica 0    0.1   0.1   0.1          0.1                     0.1
    replica 1    0.1   0.1   0.05         0.05                    error, on both; nothing is saved
                             noted        compared at powers of two
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.private.torch.tensors import tree_map
from lightning_parallel.ranks.collectives import all_alike, gather_objects, together

_Options = dict[tuple[str, int, str], Any]  # by the optimizer's class and number, the group and the option


class PartedOptions:
    """Compares the options of optimizers (rates, momenta, weight decays) that replicas have used.

    Args:
        group: the ranks that hold the same part of the model in their replicas, for tensors in host memory.
        everyone: all ranks, as well.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        self._group, self._everyone = group, everyone
        self._noted: _Options = {}

    def note(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the present options, with which a batch's update is made."""
        names = (type(each).__name__ + (f" {i}" if len(optimizers) > 1 else "") for i, each in enumerate(optimizers))
        self._noted = {
            (name, number, key): kept
            for name, optimizer in zip(names, optimizers, strict=True)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names") and (kept := _kept(value)) is not None
        }

    def refuse(self, schedulers: Sequence[LRSchedulerConfig]) -> None:
        """Refuse, on all ranks, noted options that aren't the same on all replicas. All ranks call it."""
        together(self._everyone, partial(self._compare, schedulers))

    def _compare(self, schedulers: Sequence[LRSchedulerConfig]) -> None:
        # Only now, since the host waits for the GPU here.
        own = tree_map(lambda value: value.item() if isinstance(value, Tensor) else value, self._noted)
        if all_alike(self._group, own):
            return
        of_all = gather_objects(own, self._group)
        places = dict.fromkeys(place for each in of_all for place in each)
        for name, number, key in places:
            values = [each.get((name, number, key)) for each in of_all]
            replica = next((i for i, value in enumerate(values) if repr(value) != repr(values[0])), None)
            if replica is not None:
                followed = [config.monitor for config in schedulers if config.reduce_on_plateau]
                source = f" A scheduler follows {followed[0]!r}." if followed else ""
                raise RuntimeError(
                    f"Replicas have different options for updates: {key!r} of {name}, group {number}, is {values[0]} "
                    f"on replica 0 and {values[replica]} on replica {replica}, by which their weights part.{source} "
                    f"Set it by what all replicas have, such as a value logged with sync_dist=True. Nothing is saved; "
                    f"go on from the last checkpoint."
                )


def _kept(value: Any) -> Any:
    """An option as it is now, of numbers, texts and tensors of one number; None for all else, of which ranks may have
    their own parts."""
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or isinstance(value, DTensor) else value.detach().clone()
    if isinstance(value, tuple | list):
        items = [_kept(item) for item in value]
        return None if any(item is None for item in items) else items
    return value if isinstance(value, int | float | str) else None
