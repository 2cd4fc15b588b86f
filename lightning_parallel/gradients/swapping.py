"""Gradients taken off parameters, and put back.

Lightning erases gradients between the forward and the backward of a step (``zero_grad``). A pipeline has made its
gradients by then, so it takes them off the parameters and adds them in ``backward`` to those of earlier batches. It
keeps earlier gradients only where they count or somebody may read them: both take as much memory as the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.gradients.overridden import overridden

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


def erased_are_read(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """May a hook, or a ``zero_grad`` of the user's, read an update's gradients before they are erased?"""
    return bool(overridden(trainer, module, "on_before_zero_grad", "optimizer_zero_grad")) or any(
        type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers
    )
