"""A module's own hooks around a training step, for the look at it: a mean teacher is often updated in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

_HOOKS = ("on_train_batch_start", "optimizer_step", "on_before_zero_grad", "on_train_batch_end")


def hooks_around(trainer: pl.Trainer, module: pl.LightningModule, step: partial[Any]) -> Callable[[Any], None] | None:
    """A function that runs these hooks once, given what the step returned. None if the module has none, or no frozen
    parameter that one could update. Inside, only numbers and texts of the Trainer can be read; a hook that needs more
    is cut short.

    Args:
        trainer: about to run.
        module: its module.
        step: the training step, bound to a batch.
    """
    own = [name for name in _HOOKS if is_overridden(name, module)]
    if not own or all(p.requires_grad for p in module.parameters()):
        return None
    batch = step.args[0]
    optimizer = SimpleNamespace(step=lambda *args, **kwargs: None)
    arguments: dict[str, tuple[Any, ...]] = {
        "on_train_batch_start": (batch, 0),
        "optimizer_step": (0, 0, optimizer, lambda: None),
        "on_before_zero_grad": (optimizer,),
    }

    def run(output: Any) -> None:
        with _only_read(trainer, module):
            for name in own:
                try:
                    getattr(module, name)(*arguments.get(name, (output, batch, 0)))
                except Exception:  # any: what it needs isn't there yet, or has no values. The run will tell
                    continue

    return run


class _NotYetError(RuntimeError):
    """A hook wants more of a Trainer than to read a number."""


class _Numbers:
    """A Trainer's numbers and texts, such as ``global_step``."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if value is None or isinstance(value, int | float | str):
            return value
        raise _NotYetError(f"trainer.{name} can't be used in the look at the first step.")


@contextmanager
def _only_read(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    module.trainer = _Numbers(trainer)  # type: ignore[assignment]
    try:
        yield
    finally:
        module.trainer = trainer
