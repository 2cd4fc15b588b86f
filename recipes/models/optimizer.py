"""Optimizer and learning-rate schedule from their configs, for ``configure_optimizers`` of the models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from hydra.utils import get_class
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR

from recipes.models.muon import MuonAdamW


def warmup(step: int, *, warmup_steps: int) -> float:
    """Factor of the rate at update ``step`` (from 0): linear up to 1 over ``warmup_steps``, then 1."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """As :func:`warmup`, then half a cosine to ``floor`` at ``total_steps`` (Loshchilov & Hutter 2017)."""
    if step < warmup_steps:
        return warmup(step, warmup_steps=warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def configure(
    parameters: Iterable[torch.nn.Parameter],
    optimizer: Mapping[str, Any],
    scheduler: Mapping[str, Any] | None = None,
    matrices: Iterable[torch.nn.Parameter] = (),
) -> OptimizerLRScheduler:
    """What ``LightningModule.configure_optimizers`` returns.

    Args:
        parameters: what this process trains: the whole model, or its stage of it.
        optimizer: ``_target_``, the optimizer's class, and its arguments (conf/optimizer).
        scheduler: ``name`` and its arguments (conf/scheduler); None is the constant rate.
        matrices: those of ``parameters`` that Muon trains, if it is the optimizer: the weights of hidden layers.

    Raises:
        ValueError: the scheduler's name is unknown.
    """
    arguments = dict(optimizer)
    kind = get_class(arguments.pop("_target_"))
    trained: Iterable[Any] = parameters
    if issubclass(kind, MuonAdamW):
        everything, chosen = list(parameters), {id(parameter) for parameter in matrices}
        trained = [
            {"params": [p for p in everything if (id(p) in chosen) is muon], "muon": muon} for muon in (True, False)
        ]
    try:
        built: torch.optim.Optimizer = kind(trained, **arguments)
    except ValueError as error:
        raise ValueError(f"optimizer: {error}") from error
    options = dict(scheduler or {"name": "constant"})
    name = options.pop("name")
    factors: Mapping[str, Callable[..., float]] = {"constant": warmup, "cosine": warmup_cosine}
    if name not in factors:
        raise ValueError(f"scheduler.name={name!r} is not known: use 'constant' or 'cosine'")
    if name == "constant" and not options.get("warmup_steps"):
        return built
    factor = partial(factors[name], **options)
    return {"optimizer": built, "lr_scheduler": {"scheduler": LambdaLR(built, factor), "interval": "step"}}
