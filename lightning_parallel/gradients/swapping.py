"""Takes gradients off parameters, puts them back, and gives them memory of their own.

Lightning erases gradients between the forward and the backward of a step (``zero_grad``). A pipeline has made its
gradients by then, so it takes them off the parameters and adds them in ``backward`` to those of earlier batches. It
keeps earlier gradients only where they count or somebody may read them: both take as much memory as the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor | None]  # by parameter name; None: no gradient


def swap_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]) -> Gradients:
    """Set every ``p.grad`` to the gradient of its name (None if there is none), and return what they were before.
    Nothing is copied."""
    before: Gradients = {}
    for name, parameter in parameters.items():
        before[name] = parameter.grad
        parameter.grad = gradients.get(name)
    return before


def add_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]) -> None:
    """Add gradients to every ``p.grad``, in place where there is one."""
    for name, gradient in gradients.items():
        if gradient is not None:
            present = parameters[name].grad
            parameters[name].grad = gradient if present is None else present.add_(gradient)


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
