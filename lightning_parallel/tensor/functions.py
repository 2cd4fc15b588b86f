"""Collectives that autograd can pass through. Each is a linear map; its backward is the transposed map.

With t ranks, x_i the tensor on rank i, and [x_0 .. x_t-1] their concatenation along ``dim``::

    function         forward on rank i            backward on rank i
    copy             y_i = x                      g = sum_j g_j                 Megatron-LM's f (2019, section 3)
    reduce           y_i = sum_j x_j              g_i = g                       Megatron-LM's g
    split            y_i = piece i of x           g = [g_0 .. g_t-1]
    gather           y_i = [x_0 .. x_t-1]         g_i = piece i of g
    reduce_scatter   y_i = piece i of sum_j x_j   g_i = [g_0 .. g_t-1]          Korthikanti et al. 2022, section 4.2.2
    gather_sum       y_i = [x_0 .. x_t-1]         g_i = piece i of sum_j g_j    the same

``x`` without an index is equal on all ranks, and so is all that is computed from it. That is why the backward of
``reduce`` sends nothing, and that of ``gather`` takes its piece without a sum: each rank has computed the whole loss,
not a part of it. Sizes that t doesn't divide are cut as :func:`~lightning_parallel.ranks.shard.piece` cuts them.

Inputs are never written to. Tensors without memory (on the meta device, or standing for a value of another pipeline
stage) get results of the right shape, and nothing is sent. None of the functions has a second derivative. If a rank is
lost, the backend's own RuntimeError is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch.groups import gather_into, reduce_scatter_into
from lightning_parallel.ranks.shard import piece

Group = dist.ProcessGroup
Map = Callable[[Tensor], Tensor]


def copy(x: Tensor, group: Group) -> Tensor:
    """Enter a sharded region: the same values ``[...]``, equal on all ranks. The gradients are summed over the
    group."""
    return _mapped(x, group, _alias, lambda g: all_reduced(g, group))


def reduce(x: Tensor, group: Group) -> Tensor:
    """Leave a sharded region: the sum ``[...]`` over the group, equal on all ranks. The gradient passes unchanged."""
    return _mapped(x, group, lambda t: all_reduced(t, group), lambda g: g)


def reduce_(x: Tensor, group: Group) -> Tensor:
    """:func:`reduce` in the memory of ``x``: for a fresh, contiguous result that no backward needs."""
    return _mapped(x, group, lambda t: all_reduced_(t, group), lambda g: g) if sends(x, group) else x


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece ``[..., n / t, ...]`` of an ``x`` ``[..., n, ...]`` that all ranks have. The gradients are
    joined."""
    size = x.shape[dim]
    return _mapped(x, group, lambda t: own_piece(t, dim, group), lambda g: joined(g, dim, group, size))


def gather(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """The ranks' pieces ``[..., n / t, ...]``, joined to ``[..., n, ...]``, for a computation that is the same on all
    ranks. ``size`` is n, needed where t doesn't divide it."""
    return _mapped(x, group, lambda t: joined(t, dim, group, size), lambda g: own_piece(g, dim, group))


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece ``[..., n / t, ...]`` of the sum over the group of ``x`` ``[..., n, ...]``. The gradients are
    joined."""
    size = x.shape[dim]
    return _mapped(x, group, lambda t: summed_piece(t, dim, group), lambda g: joined(g, dim, group, size))


def gather_sum(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """:func:`gather` for a computation that differs between ranks: its gradients are summed."""
    return _mapped(x, group, lambda t: joined(t, dim, group, size), lambda g: summed_piece(g, dim, group))


# -- the functions of autograd -----------------------------------------------------------------------------------


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)


def _mapped(x: Tensor, group: Group, forward: Map, transposed: Map) -> Tensor:
    return x if group.size() == 1 else _Linear.apply(x, forward, transposed)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """``forward(x)``, a linear map, with ``transposed(g)`` as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transposed: Map) -> Tensor:  # type: ignore[override]
        ctx.transposed = transposed
        y = forward(x)
        if y is x:
            ctx.mark_dirty(x)
            return x
        # No view, which autograd would let nobody change in place, unless the change would reach `x` unseen.
        return y if forward is _alias else y.data

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.transposed(g), None, None


# -- collectives on tensors, without autograd --------------------------------------------------------------------


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, in memory of its own."""
    return all_reduced_(x.clone(memory_format=torch.contiguous_format), group)


def all_reduced_(x: Tensor, group: Group) -> Tensor:
    """:func:`all_reduced` in the memory of ``x``."""
    if sends(x, group):
        dist.all_reduce(x, group=group)
    return x


def own_piece(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece of ``x``, in memory of its own, so the rest of ``x`` can be freed."""
    start, stop = piece(x.shape[dim], group.rank(), group.size())
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def joined(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """The group's pieces, concatenated along ``dim`` to ``size``; by default all are as large as this one."""
    count = group.size()
    size = x.shape[dim] * count if size is None else size
    start, stop = piece(size, group.rank(), count)
    assert x.shape[dim] == stop - start, f"a piece of {x.shape[dim]} where {stop - start} of {size} are due"
    # All messages have one size. With `dim` in front pieces lie one after the other, so there is no list to copy.
    own = _padded(x, dim, piece(size, 0, count)[1]).movedim(dim, 0).contiguous()
    whole = own.new_empty(count * own.shape[0], *own.shape[1:])
    if sends(own, group):
        gather_into(whole, own, group)
    return whole.narrow(0, 0, size).movedim(0, dim).contiguous()


def summed_piece(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece of the sum over the group."""
    count, size = group.size(), x.shape[dim]
    start, stop = piece(size, group.rank(), count)
    length = piece(size, 0, count)[1]
    whole = _padded(x, dim, length * count).movedim(dim, 0).contiguous()
    own = whole.new_empty(length, *whole.shape[1:])
    if sends(whole, group):
        reduce_scatter_into(own, whole, group=group)
    return own.narrow(0, 0, stop - start).movedim(0, dim).contiguous()


def sends(x: Tensor, group: Group) -> bool:
    """Is there something to send, and somebody to send it to? A group on paper notes what has no memory, too."""
    return group.size() > 1 and (isinstance(group, GroupOnPaper) or has_memory(x))


def has_memory(x: Tensor) -> bool:
    """False for empty tensors, and for those that stand for a shape only: there is nothing to send."""
    try:
        return x.data_ptr() != 0
    except RuntimeError:  # an absent tensor's
        return False


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    dim %= x.dim()
    return x if missing == 0 else F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
