"""Gradients summed over ranks that each hold a part of them, as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.ranks.collectives import guarded
from lightning_parallel.ranks.local_model import local_part


def summed_over(
    group: dist.ProcessGroup,
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    host_group: dist.ProcessGroup | None = None,
) -> Gradients:
    """The sum of each named gradient over the ranks of a group. A collective over the group.

    A parameter that got a gradient on no rank keeps none, so an optimizer skips it as it does in a single process. For
    this each rank sends one flag for each parameter. The host has to wait for a GPU to read flags there::

        one group       [ flags, gradient, gradient, ... ]           the flags are read on a rank that lacks a gradient
        a host group    [ gradient, gradient, ... ]    [ flags ]     they go from host to host

    Args:
        names: the parameters to sum, the same on all ranks.
        parameters: at least the named ones; they give the shapes, the dtypes and the device. Of a fully sharded one,
            all ranks of the group hold the same part.
        gradients: this rank's gradients; a missing one counts as zero.
        host_group: the same ranks, for tensors in host memory. If it is None, or the group itself, flags travel with
            the gradients.

    Raises:
        PeerLostError: a rank has stopped.
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
    flat = [part.to(dtype).flatten() for part in parts]
    if host_group is None or host_group is group:
        message = torch.cat([flags.to(parts[0].device, non_blocking=True), *flat])
        guarded(dist.all_reduce, message, group=group)
        flags, message = message[: len(names)], message[len(names) :]
        all_exist = all(gradient is not None for gradient in own)
    else:
        message = torch.cat(flat)
        work = guarded(dist.all_reduce, message, group=group, async_op=True)
        assert work is not None, "this rank is a member of its group"
        guarded(dist.all_reduce, flags, group=host_group)  # while the gradients are under way
        guarded(work.wait)
        all_exist = False
    exist = [True] * len(names) if all_exist else flags.tolist()
    sums = message.split([part.numel() for part in parts])
    return {
        name: _like(parameters[name], total.to(part.dtype).view_as(part)) if exists else None
        for name, part, total, exists in zip(names, parts, sums, exist, strict=True)
    }


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap ``local``, this rank's part of a gradient, as ``parameter`` is wrapped."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
