"""Gradients taken off parameters, and put back.

Lightning erases gradients between the forward and the backward of a step (``zero_grad``). A pipeline has made its
gradients by then, so it takes them off the parameters and adds them in ``backward`` to those of earlier batches.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def multiplied(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply a gradient in place, unless the factor is known to be 1."""
    return gradient if isinstance(factor, float) and factor == 1.0 else gradient.mul_(factor)


def add_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]) -> None:
    """Add gradients to every ``p.grad``, in place where there is one."""
    for name, gradient in gradients.items():
        if gradient is not None:
            present = parameters[name].grad
            parameters[name].grad = gradient if present is None else present.add_(gradient)
