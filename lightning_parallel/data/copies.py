"""Copies of one tensor on several ranks, made equal: as one of the ranks has it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def make_equal(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Fill the tensors, in place, with what rank ``source`` has in them. All ranks of the group give the same ones.

    Args:
        tensors: of any dtype and layout; parameters are written to behind autograd's back.
        source: the global rank whose values count.
        group: of the ranks that hold copies.
    """
    if group.size() == 1:
        return
    for tensor in tensors:
        raw = tensor.data.contiguous().reshape(-1).view(torch.uint8)  # backends don't know every dtype
        dist.broadcast(raw, source, group)
        tensor.data.copy_(raw.view(tensor.dtype).view_as(tensor))
