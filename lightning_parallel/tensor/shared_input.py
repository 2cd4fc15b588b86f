"""The whole input of layers that hold some of the outputs: its gradients are summed over the ranks.

A layer by itself sends its input's gradient while it computes the weight's (:func:`copy_linear`)::

    backward     dx = g W     all-reduce of dx ........................ wait
                              dW = g^T x     db = sum of g's rows

Layers that get one input, such as q, k and v, share one ``copy`` of it (:class:`Siblings`). Autograd first adds up
their gradients, then sends the sum::

    x --- copy --+-- q        backward:   dx = sum over ranks of (dx_q + dx_k + dx_v)
                 +-- k
                 +-- v
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.tensor import functions


class Siblings:
    """``count`` layers that are usually called with the same tensor, one after the other. Once all have been called,
    with one input or several, nothing is kept."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._called: set[int] = set()  # the layers, by id, since nothing was kept
        self._input: weakref.ref[Tensor] | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: dist.ProcessGroup, layer: object) -> Tensor:
        """``functions.copy(x, group)``; layers that are called with this very ``x`` all get the same tensor."""
        if id(layer) in self._called:
            self._called = set()  # in the forward before, not all were called
        if self._copy is None or self._input is None or self._input() is not x:
            self._input, self._copy = weakref.ref(x), functions.copy(x, group)
        copy = self._copy
        self._called.add(id(layer))
        if len(self._called) == self._count:
            self._called, self._input, self._copy = set(), None, None
        return copy


def copy_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """``F.linear(copy(x, group), weight, bias)``, with communication and computation overlapped in the backward. ``x``
    ``[..., in]`` is equal on all ranks, ``weight`` is ``[out here, in]``."""
    given, device = [x, weight, bias], x.device.type
    if torch.is_autocast_enabled(device):  # which doesn't act on a custom autograd function: cast as for F.linear
        dtype = torch.get_autocast_dtype(device)
        given = [
            t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype) for t in given
        ]
    return _CopyLinear.apply(*given, group)  # type: ignore[no-any-return, no-untyped-call]


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(x, weight, bias).data  # no view, which autograd would let nobody change in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():  # once_differentiable would refuse only where ``g`` itself has a gradient
            raise RuntimeError("ColumnParallelLinear has no second derivative: leave out create_graph=True.")
        x, weight = ctx.saved_tensors
        shape = g.shape
        g = g.reshape(-1, shape[-1])
        grad_x = g @ weight
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True) if functions.has_memory(grad_x) else None
        grad_weight = grad_bias = None
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            # In the weight's own memory layout, so the gradient is accumulated without a copy.
            grad_weight = g.t() @ x if weight.is_contiguous() else (x.t() @ g).t()
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0)
        if work is not None:
            work.wait()
        return grad_x.view(*shape[:-1], weight.shape[1]), grad_weight, grad_bias, None
