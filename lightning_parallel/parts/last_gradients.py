"""The gradients of the last update, which Lightning erases after ``training_step``, before the backward.

A pipeline has made the new ones by then. To keep both costs as much memory as the parameters take.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_parallel.gradients.swapping import Gradients, swap_gradients
from lightning_parallel.lightning_private import callbacks_of


def last_gradients(module: pl.LightningModule, parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Take them off the parameters before the new ones are made.

    Args:
        module: whose parameters they are.
        parameters: of this rank.

    Returns:
        Those that somebody may look at when Lightning erases them, to be put back until then; nothing if nobody does.
    """
    last = swap_gradients(parameters, {})
    return last if _are_looked_at(module.trainer, module) else {}


def _are_looked_at(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    return (
        is_overridden("on_before_zero_grad", module)
        or is_overridden("optimizer_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", each, Callback) for each in callbacks_of(trainer))
        or any(type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers)
    )
