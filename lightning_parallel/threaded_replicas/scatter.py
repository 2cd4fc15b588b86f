"""A batch divided into the replicas' shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import batch_size, mapped, split


@dataclass(slots=True)
class Share:
    """What one replica gets of a batch.

    Attributes:
        batch: on the replica's device.
        samples: the number of samples.
        sources: the tensors that are part of an autograd graph, as they came.
        leaves: those tensors as ``batch`` has them: leaves of the replica's own graph.
    """

    batch: Any
    samples: int
    sources: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


def scatter(batch: Any, devices: Sequence[torch.device]) -> list[Share]:
    """Shares whose sizes differ by at most one. With fewer samples than devices, the first ones get a sample each.

    Raises:
        ValueError: the batch can't be divided: see :func:`lightning_parallel.batch.batch_size`.
    """
    pieces = split(batch, min(batch_size(batch), len(devices)))
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
