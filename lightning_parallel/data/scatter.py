"""A batch into the replicas' shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.microbatch import batch_size, members, rebuild, split


@dataclass(slots=True)
class Share:
    """What one replica gets of a batch.

    Attributes:
        batch: on the replica's device.
        samples: how many.
        sources: tensors of the share that are part of a graph, as they came.
        leaves: those tensors as ``batch`` has them, leaves of the replica's own graph.
    """

    batch: Any
    samples: int
    sources: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


def scatter(batch: Any, devices: Sequence[torch.device]) -> list[Share]:
    """Shares whose sizes differ by at most one; with fewer samples than devices, a sample each for the first ones.

    Raises:
        ValueError: the batch can't be divided: see :func:`lightning_parallel.pipeline.microbatch.batch_size`.
    """
    n = batch_size(batch)
    pieces = split(batch, min(n, len(devices)))
    shares = []
    for piece, device in zip(pieces, devices, strict=False):
        share = Share(batch=None, samples=batch_size(piece))

        def place(tensor: Tensor, share: Share = share, device: torch.device = device) -> Tensor:
            moved = tensor.to(device, non_blocking=True)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return moved
            share.sources.append(tensor)
            share.leaves.append(moved.detach().requires_grad_())
            return share.leaves[-1]

        share.batch = mapped(piece, place)
        shares.append(share)
    return shares


def mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``tree``, any nesting of containers, with ``function`` applied to its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    children = members(tree)
    if children is None:
        return tree
    keys, values = children
    changed = [mapped(value, function) for value in values]
    if all(new is old for new, old in zip(changed, values, strict=True)):
        return tree
    return rebuild(tree, keys, changed)
