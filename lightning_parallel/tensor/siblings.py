"""Column layers that get one input, such as q, k and v: its gradients are summed over the ranks once for all of them.

On its own, each layer would send one message of the input's size in the backward. Siblings share one ``copy``
(:mod:`~lightning_parallel.tensor.functions`). Autograd first adds up the layers' gradients, then sends their sum::

    x --- copy --+-- q        backward:   dx = sum over ranks of (dx_q + dx_k + dx_v)
                 +-- k
                 +-- v
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch.distributed as dist
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = duplicate = type(self)(self._count)
        return duplicate
