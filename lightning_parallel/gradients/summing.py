"""Gradients summed over ranks that each hold a part of them, as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives import guarded
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.local_model import local_part


def summed_over(
    group: dist.ProcessGroup,
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    host_group: dist.ProcessGroup | None = None,
) -> Gradients:
    """The sum of each named gradient over the ranks of a group. A collective over the group.

    The message is ``[one flag a parameter, gradient, gradient, ...]``: a parameter that got a gradient on no rank keeps
    none, so an optimizer skips it as it does in a single process. To read the flags from a GPU, the host would have to
    wait for it. So they are read only on a rank that lacks a gradient, or go apart, from host to host.

    Args:
        group: the ranks.
        names: the parameters to sum, equal on all ranks.
        parameters: at least the named ones; they give the shapes, the dtypes and the device. All ranks of the group
            hold the same part of one that is fully sharded.
        gradients: this rank's gradients; a missing one counts as zero.
        host_group: the same ranks, for tensors in host memory. By default the flags go with the gradients.

    Returns:
        The sums by name, in the parameters' dtypes.
    """
    if not names:
        return {}
    own = [gradients.get(name) for name in names]
    dtype = max((parameters[name].dtype for name in names), key=lambda each: each.itemsize)
    parts = [
        torch.zeros_like(local_part(parameters[name])) if gradient is None else local_part(gradient)
        for name, gradient in zip(names, own, strict=True)
    ]
    flags = torch.tensor([gradient is not None for gradient in own], dtype=dtype)
    apart = host_group is not None and host_group is not group
    with_gradients = [] if apart else [flags.to(parts[0].device, non_blocking=True)]
    message = torch.cat([*with_gradients, *(part.to(dtype).flatten() for part in parts)])
    work = guarded(dist.all_reduce, message, group=group, async_op=True)
    if apart:
        guarded(dist.all_reduce, flags, group=host_group)
    assert work is not None
    guarded(work.wait)
    counts, *sums = message.split([0 if apart else len(names), *(part.numel() for part in parts)])
    if apart:
        counts = flags
    exist = counts.tolist() if apart or any(gradient is None for gradient in own) else [True] * len(names)
    return {
        name: _like(parameters[name], total.to(part.dtype).view_as(part)) if exists else None
        for name, part, total, exists in zip(names, parts, sums, exist, strict=True)
    }


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A gradient of ``parameter``, of which this rank has ``local``."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
