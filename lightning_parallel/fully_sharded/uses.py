"""Compares between the replicas which modules a step has used.

Fully sharded replicas gather a unit's parameters together, and reduce those of its gradients that exist together. If a
branch of the user's step depends on values or on the rank, one replica may use module A where another one uses module
B. If both have the same size, nothing fails, and each computes with a mixture of the two. So before each backward the
replicas compare one number, a hash of what they have used since the last comparison::

    units      in the order of their calls: each call gathers
    modules    any order and number of calls: each has a gradient, or has none
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.ranks.collectives import all_alike, gather_objects


class ModuleUses:
    """The modules that are called, as this replica sees them. The hooks that watch them stay for good. ``modules`` are
    all those that have divided parameters."""

    def __init__(
        self, units: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], host_group: dist.ProcessGroup
    ) -> None:
        self._host_group = host_group
        self._units: list[str] = []
        self._modules: set[str] = set()
        if host_group.size() > 1:
            for name, unit in units.items():
                unit.register_forward_pre_hook(partial(self._note_unit, name))
            for name, module in modules.items():
                module.register_forward_pre_hook(partial(self._note_module, name))

    def _note_unit(self, name: str, unit: nn.Module, args: Any) -> None:
        self._units.append(name)

    def _note_module(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False)):
            self._modules.add(name)

    def compare(self) -> None:
        """Compare the uses since the last comparison. All replicas call it.

        Raises:
            RuntimeError: on all replicas, if they have called different modules.
        """
        if self._host_group.size() == 1:
            return
        used = (self._units, sorted(self._modules))
        self._units, self._modules = [], set()
        if all_alike(self._host_group, used):
            return
        everyones = gather_objects(used, self._host_group)
        rank, other = next((rank, each) for rank, each in enumerate(everyones) if each != everyones[0])
        part = 0 if everyones[0][0] != other[0] else 1
        pairs = zip_longest(map(repr, everyones[0][part]), map(repr, other[part]), fillvalue="no other")
        one, another = next((a, b) for a, b in pairs if a != b)
        raise RuntimeError(
            f"Replicas have used different modules in a step: where replica 0 used {one}, replica {rank} used "
            f"{another}. Fully sharded replicas gather parameters and reduce gradients together, so they have "
            f"to use the same modules: let no branch depend on the rank or on the values of a share of the batch, or "
            f"use strategy='ddp_find_unused_parameters_true'."
        )
