"""Runs a module's own hooks around a training step in the trace of that step: a mean teacher is often updated in
one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.pipeline.absent import AbsentValueError
from lightning_parallel.pipeline.origins import parameter_of
from lightning_parallel.pipeline.partition import Partition

_HOOKS = ("on_train_batch_start", "optimizer_step", "on_before_zero_grad", "on_train_batch_end")


class StepHooks:
    """Runs each of the module's own hooks once, given what the step returned. Inside, only numbers and texts of the
    Trainer can be read; a hook that needs more is broken off. ``step`` is bound to a batch."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, step: partial[Any]) -> None:
        self._trainer, self._module = trainer, module
        self._batch = step.args[0]
        self._asked: dict[str, str] = {}  # parameters and buffers whose values a hook has asked for, with the hook

    def __call__(self, output: Any) -> None:
        optimizer = SimpleNamespace(step=lambda *args, **kwargs: None, param_groups=[_Options()], state={})
        outputs = output if isinstance(output, Mapping) else {"loss": output}  # as Lightning passes it
        arguments: dict[str, tuple[Any, ...]] = {
            "on_train_batch_start": (self._batch, 0),
            "optimizer_step": (0, 0, optimizer, lambda: None),
            "on_before_zero_grad": (optimizer,),
            "on_train_batch_end": (outputs, self._batch, 0),
        }
        with _only_read(self._trainer, self._module):
            for name in _HOOKS:
                if is_overridden(name, self._module):
                    self._run(name, arguments[name])

    def _run(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            getattr(self._module, name)(*arguments)
        except AbsentValueError as error:
            self._asked |= {found: name for origin in error.origins if (found := parameter_of(origin)) is not None}
        except Exception:  # any: what it needs isn't there yet. The run will tell
            pass

    def check(self, partition: Partition, stage: int) -> None:
        """Check that this rank can run the hooks.

        Raises:
            ValueError: one asks for the value of a parameter that another stage holds.
        """
        for parameter, hook in self._asked.items():
            holders = partition.holders_of(parameter)
            if stage not in holders:
                raise ValueError(
                    f"{hook} asks for the value of '{parameter}', which only stage {holders[0]} has, but it runs on "
                    f"all stages. Compute it in training_step, or use a strategy without stages."
                )


class _Options(dict[str, float]):
    """The options of an optimizer's group, such as its learning rate."""

    def __missing__(self, key: str) -> float:
        return 1.0


class _NotYetError(RuntimeError):
    """A hook needs more of a Trainer than a number or a text."""


class _Numbers:
    """Gives a Trainer's numbers and texts, such as ``global_step``, and nothing else."""

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
