"""The first gradients of leaves get memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def gradients_apart(leaves: Iterable[Tensor]) -> Iterator[None]:
    """A context for a backward, in which the first gradients of leaves get memory of their own. For one sample,
    autograd takes one memory for the gradients of p and q in ``x + p[None] + q[None]``, and would add the next
    microbatch's to it twice."""
    first = {id(leaf): leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None}
    yield
    taken: set[int] = set()
    for leaf in first.values():
        gradient = leaf.grad
        if gradient is not None and gradient.layout is not torch.strided:
            leaf.grad = gradient.clone()  # its values may lie where another gradient does
        elif type(gradient) is Tensor:
            place = gradient.untyped_storage().data_ptr()
            if place in taken:
                leaf.grad = gradient.clone()
            if place:  # empty ones have none
                taken.add(place)
