"""The weights of synchronous schedules: the module's own, whose gradients accumulate in ``p.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.private.torch import parameters_of

Half: TypeAlias = Literal[0, 1, 2]  # of a backward: the first, or the second; 0 for one in one piece


class CurrentWeights:
    """The module's own parameters, for synchronous schedules. Gradients accumulate in ``p.grad``."""

    reading = None  # updates aren't counted

    def __init__(self, module: nn.Module) -> None:
        # Where modules keep their parameters, not the parameters: gathering replaces them, and pruning renames them.
        # What other stages hold stays absent.
        stores = (parameters_of(each) for each in module.modules())
        self._stores = [store for store in stores if any(not isinstance(p, AbsentTensor) for p in store.values())]

    def forward(self, step: Callable[[], Any]) -> tuple[Any, None]:
        """Run ``step`` with the weights that a forward starting now uses. Returns its result, and a token for the
        backward."""
        return step(), None

    def backward(
        self, token: None, loss: BatchLoss | None = None, half: Half = 0, *, ends_batch: bool = False
    ) -> AbstractContextManager[None]:
        """A context for the backward of the forward that returned ``token``, or for a half of it.

        Args:
            loss: the whole batch's.
            ends_batch: no other backward of the batch follows. The strategy completes its gradients.
        """
        return gradients_apart([p for store in self._stores for p in store.values() if p is not None])


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
