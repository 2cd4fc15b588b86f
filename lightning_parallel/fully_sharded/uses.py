"""Compares between the replicas which parameters a step has used.

Fully sharded replicas gather a unit's parameters together, and reduce those of its gradients that exist together. If a
branch of the user's step depends on values or on the rank, one replica may use module A where another one uses module
B. If both have the same size, nothing fails, and each computes with a mixture of the two. Or only one of them waits for
a gradient. So before each backward the replicas compare one number, a hash of what they have used since the last
comparison::

    units         in the order of their calls: each call gathers
    parameters    those to whose gradients the backward is about to add
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.ranks.collectives import all_alike, gather_objects


class Uses:
    """What steps use, as this replica sees it. The hooks that watch it stay for good. ``modules`` are all those that
    have divided parameters."""

    def __init__(
        self, units: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], host_group: dist.ProcessGroup
    ) -> None:
        self._host_group = host_group
        self._units: list[str] = []
        self._names: dict[Tensor, str] = {}  # of gathered parameters, of which each module has the same ones each time
        if host_group.size() > 1:
            for name, unit in units.items():
                unit.register_forward_pre_hook(partial(self._note_unit, name))
            for name, module in modules.items():
                module.register_forward_pre_hook(partial(self._note_module, name))

    def _note_unit(self, name: str, unit: nn.Module, args: Any) -> None:
        self._units.append(name)

    def _note_module(self, name: str, module: nn.Module, args: Any) -> None:
        self._names.update((p, f"{name}.{key}") for key, p in module.named_parameters(recurse=False))

    def compare(self, loss: Tensor | None = None) -> None:
        """Compare the uses since the last comparison. All replicas call it.

        Args:
            loss: of which the backward is about to begin, if one is.

        Raises:
            RuntimeError: on all replicas, if they have used different units or parameters.
        """
        if self._host_group.size() == 1:
            return
        reached = leaves([get_gradient_edge(loss)]) if loss is not None and loss.requires_grad else set()
        used = (self._units, sorted(self._names[leaf] for leaf in reached if leaf in self._names))
        self._units = []
        if all_alike(self._host_group, used):
            return
        everyones = gather_objects(used, self._host_group)
        rank, other = next((rank, each) for rank, each in enumerate(everyones) if each != everyones[0])
        part = 0 if everyones[0][0] != other[0] else 1
        pairs = zip_longest(map(repr, everyones[0][part]), map(repr, other[part]), fillvalue="no other")
        one, another = next((a, b) for a, b in pairs if a != b)
        raise RuntimeError(
            f"Replicas have used different parts of the module in a step: where replica 0 used {one}, replica {rank} "
            f"used {another}. Fully sharded replicas gather parameters and reduce gradients together, so they have "
            f"to use the same modules: let no branch depend on the rank or on the values of a share of the batch, or "
            f"use strategy='ddp_find_unused_parameters_true'."
        )


def leaves(edges: Sequence[GradientEdge]) -> set[Tensor]:
    """The leaves to whose gradients a backward adds that begins at these edges."""
    nodes = dict.fromkeys(edge.node for edge in edges)
    waiting = [*nodes]
    for node in waiting:  # it grows
        for below, _ in node.next_functions:
            if below is not None and below not in nodes:
                nodes[below] = None
                waiting.append(below)
    return {node.variable for node in nodes if hasattr(node, "variable")}
