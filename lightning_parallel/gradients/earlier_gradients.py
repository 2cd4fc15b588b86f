"""Sets the gradients of earlier batches aside while a pipeline computes new ones.

Lightning erases them after ``training_step``, unless gradients are accumulated. By then a pipeline has made the new
ones, so to keep both costs as much memory as the parameters take.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_parallel.gradients.swapping import Gradients, swap_gradients
from lightning_parallel.private.lightning.launching import callbacks_of


def earlier_gradients(module: pl.LightningModule, parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Take earlier gradients off the parameters before new ones are made. Returned are those that count, or that
    somebody may read; none if they are going to be erased."""
    trainer = module.trainer
    earlier = swap_gradients(parameters, {})
    is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    return {} if is_first and not _are_looked_at(trainer, module) else earlier


def _are_looked_at(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    return (
        is_overridden("on_before_zero_grad", module)
        or is_overridden("optimizer_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", each, Callback) for each in callbacks_of(trainer))
        or any(type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers)
    )
