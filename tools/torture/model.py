"""The model of the runs: its layers reach the moments that are inside of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes.models.classifier import MLP
from tools.torture.fault import Moment, reach


class Probe(nn.Module):
    """Lets its input through, and reaches a moment in the forward and in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        reach(Moment.FORWARD)
        through: Tensor = _Probe.apply(x)
        return through


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        reach(Moment.BACKWARD)
        return grad


class Probed(MLP):
    """A perceptron with a probe in each hidden layer.

    Args:
        settings: of the perceptron.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for layer in self.net.children():
            if isinstance(layer, nn.Sequential):
                layer.append(Probe())
