"""What crosses a cut between two stages, as autograd sees it on either side.

A stage's graph begins with what arrived, and ends with what departs. Between the two stages' graphs there are messages
only: the backward of the next stage leaves the gradients of its arrival, which are sent back and start this one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Arrival:
    """What arrived from the stage before, and, after the backward, the gradients to send back.

    Args:
        tensors: the values.
        requires_grad: for each, whether the sender wants a gradient.
    """

    def __init__(self, tensors: list[Tensor], requires_grad: list[bool]) -> None:
        self._tensors = tensors
        self._wanted = requires_grad
        self._forms = [(t.shape, t.dtype) for t, w in zip(tensors, requires_grad, strict=True) if w]
        self._gradients: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self._wanted)

    def receive(self) -> list[Tensor]:
        """The tensors as autograd sees them, once: results of an operation whose backward collects the gradients. Not
        leaves, so that a layer may work on them in place (``nn.ReLU(inplace=True)``). Their values may be yet to
        come."""
        # `.data`: no views of one message buffer, so each may be changed in place.
        tensors = [t.data for t in self._tensors]
        self._tensors = []  # their memory is the step's from here on
        if not (any(self._wanted) and torch.is_grad_enabled()):
            return tensors
        anchor = torch.empty((), requires_grad=True)
        live = iter(_Receive.apply(anchor, self, [t for t, w in zip(tensors, self._wanted, strict=True) if w]))  # type: ignore[no-untyped-call]
        return [next(live) if w else t for t, w in zip(tensors, self._wanted, strict=True)]

    def collect(self, gradients: tuple[Tensor, ...]) -> None:
        self._gradients = list(gradients)

    def gradients(self, device: torch.device) -> list[Tensor]:
        """One for each tensor that requires one; zeros where the loss doesn't depend on it."""
        if self._gradients is None:
            return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._forms]
        return self._gradients


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival, tensors: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.arrival = arrival
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.arrival.collect(gradients)
        return None, None, None


@dataclass
class Departure:
    """What the stage's last layer returned: its tensors, in order, to be sent on."""

    tensors: list[Tensor]
