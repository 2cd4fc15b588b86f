"""Finds code of the user's that runs around an update: hooks of the module's, and of callbacks."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_parallel.private.lightning.launching import callbacks_of


def overridden(trainer: pl.Trainer, module: pl.LightningModule, *hooks: str, unless: str = "") -> list[str]:
    """Those of these hooks, as ``Class.hook``, for which the module or a callback has code of the user's own. Classes
    whose attribute ``unless`` is False are left out."""
    return [
        f"{type(owner).__name__}.{hook}"
        for owner in (module, *callbacks_of(trainer))
        for hook in hooks
        if (owner is module or hasattr(Callback, hook)) and is_overridden(hook, owner)
        if getattr(owner, unless, True) and _is_users(getattr(owner, hook))
    ]


def _is_users(hook: Any) -> bool:
    function = inspect.unwrap(hook)
    module: str = getattr(getattr(function, "func", function), "__module__", "")
    return not module.startswith(("lightning.", "lightning_parallel."))


def erased_are_read(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """May a hook, or a ``zero_grad`` of the user's, read an update's gradients before they are erased?"""
    return bool(overridden(trainer, module, "on_before_zero_grad", "optimizer_zero_grad")) or any(
        type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers
    )
