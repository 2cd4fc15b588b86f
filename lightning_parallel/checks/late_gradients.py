"""What an asynchronous pipeline can't do: its stages make their updates at different times, and so do chunks in a V."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.gradients.overridden import overridden
from lightning_parallel.private.lightning.launching import callbacks_of


def refuse_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse hooks at moments other than a stage's step, where alone gradients are on the parameters, and epochs
    without updates."""
    for hook in overridden(trainer, module, "optimizer_zero_grad", "on_after_backward"):
        raise ValueError(
            f"{hook}: in the asynchronous pipeline each stage zeroes and completes its gradients within its own step. "
            f"Use on_before_optimizer_step, or PipelineStrategy."
        )
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise ValueError(
                f"{type(callback).__name__}: for BatchNorm's statistics it runs an epoch without updates, which the "
                f"asynchronous pipeline would make. Use WeightAveraging, which averages the statistics."
            )


def check_in_v(trainer: pl.Trainer, module: pl.LightningModule, schedule: str) -> None:
    """Refuse averages of weights, and warn of hooks that are called for each chunk."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} with schedule={schedule!r}: in a V the two chunks of a stage make their "
                f"updates at different times, so it would average weights that never were together. Use "
                f"schedule='1f1b', or PipelineStrategy."
            )
    found = overridden(trainer, module, "on_before_optimizer_step", "configure_gradient_clipping")
    if found:
        rank_zero_warn(
            f"{', '.join(found)}: with schedule={schedule!r} it is called twice for a batch on each stage, for each of "
            f"the stage's two chunks with its gradients alone. If it counts updates, or computes a number from all "
            f"gradients, use schedule='1f1b', or PipelineStrategy."
        )


def refuse_averages(trainer: pl.Trainer, in_v: bool) -> None:
    """Refuse averages of weights that other callbacks than Lightning's keep. They have made them when training
    starts."""
    advice = "PipelineStrategy" if in_v else "Lightning's EMAWeightAveraging or WeightAveraging"
    for callback in callbacks_of(trainer):
        averages = {} if isinstance(callback, WeightAveraging) else vars(callback)
        for name in (name for name, value in averages.items() if isinstance(value, AveragedModel)):
            raise ValueError(
                f"{type(callback).__name__}.{name} is an AveragedModel. After a batch the stages of an asynchronous "
                f"pipeline have made different numbers of updates, so it would average weights that never were "
                f"together. Use {advice}."
            )


def refuse_ties(module: nn.Module, parts: Partition) -> None:
    """Refuse parameters that two stages hold and train: their copies would get updates of different staleness."""
    learns = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    # Every stage holds the loose ones. Those that don't read one only copy it.
    shared = {name: parts.loose.get(name, stages) for name, stages in parts.shared().items() if name in learns}
    for name, stages in shared.items():
        if len(stages) < 2:
            continue
        others = [other for other, first in parts.aliases.items() if first == name and other != name]
        used = f"is tied to {others} on" if others else "is used on"
        fix = (
            "Untie the weights (tie_word_embeddings=False in transformers)"
            if others
            else "Call its layer once in a step, on all inputs together (torch.cat), and use it on one stage only (see "
            "`layers` and `balance`)"
        )
        raise ValueError(
            f"'{name}' {used} stages {list(stages)}: asynchronous updates of different staleness would drive the "
            f"copies apart. {fix}, or take PipelineStrategy."
        )
