"""The tensors that cross a cut between two stages, as autograd sees them on either side.

A stage's autograd graph begins with what arrived, and ends with what departs. Only messages connect the graphs of two
stages. The next stage's backward computes the gradients of its arrival; they are sent back, and start this stage's
backward::

    stage 0                                   stage 1
    layers --> outputs  ----- activation -->  Arrival --> layers --> outputs
           <-- backward  <--- gradient ----- gradients <-- backward
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.messages.message import Format

# In a message of gradients, the only tensor that wants a gradient itself.
NO_GRADIENT = torch.empty(0, requires_grad=True)


@dataclass(eq=False)
class Arrival:
    """The tensors that arrived from the previous stage, and, after the backward, the gradients to send back.

    Attributes:
        tensors: those that arrived; none once the step has received them.
        format: the message's format. It tells for each tensor whether the sender wants a gradient.
        anchor: the leaf at which a backward has computed the gradients to send back; None if there are none.
    """

    tensors: list[Tensor]
    format: Format
    anchor: Tensor | None = field(default=None, init=False)
    _gradients: list[Tensor | None] = field(default_factory=list, init=False)

    def copies(self) -> list[Tensor]:
        """Copies of the values. To be made before :meth:`receive`."""
        return [tensor.clone() for tensor in self.tensors]

    def receive(self) -> list[Tensor]:
        """The tensors for one call, as results of an operation whose backward collects the gradients. They are no
        leaves, so a layer may change them in place (``nn.ReLU(inplace=True)``)."""
        # `.data`: no views of one message buffer, so each may be changed in place.
        tensors = [t.data for t in self.tensors]
        self.tensors = []  # their memory is the step's from here on
        wanted = [t for t, each in zip(tensors, self.format, strict=True) if each.requires_grad]
        if not (wanted and torch.is_grad_enabled()):
            return tensors
        self.anchor = torch.empty((), requires_grad=True)
        live = iter(_Receive.apply(self.anchor, self, wanted))  # type: ignore[no-untyped-call]
        return [next(live) if each.requires_grad else t for t, each in zip(tensors, self.format, strict=True)]

    def gradients(self) -> list[Tensor]:
        """The gradients of the tensors of which the sender wants one; :data:`NO_GRADIENT` for those on which the loss
        doesn't depend. There the sender begins no backward, so parameters behind them keep a gradient of None, as in
        one process. Others want none, also where a backward of the user's own has returned one that does.

        They can be taken once: the graph refers to this arrival, and a loss that is kept refers to the graph.
        """
        found = self._gradients or [None] * sum(each.requires_grad for each in self.format)
        self._gradients = []
        return [NO_GRADIENT if gradient is None else gradient.detach() for gradient in found]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival, tensors: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.arrival._gradients = list(gradients)
        return None, None, None
