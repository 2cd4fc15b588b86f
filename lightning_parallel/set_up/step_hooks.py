"""Runs a module's own hooks around a training step in the trace of that step: a mean teacher is often updated in
one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.absent.origins import origin_of_parameter, parameter_of
from lightning_parallel.absent.tensor import AbsentValueError, absent_like
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.values import changed


class StepHooks:
    """Runs each of the module's own hooks once, given what the step returned for a batch. Inside, only numbers and
    texts of the Trainer can be read; a hook that needs more is broken off."""

    def __init__(self, module: pl.LightningModule, batch: Any) -> None:
        self._module, self._batch = module, batch
        self._asked: dict[str, str] = {}  # parameters and buffers whose values a hook has asked for, with the hook

    def __call__(self, output: Any) -> None:
        options: dict[str, float] = defaultdict(lambda: 1.0)  # the learning rate, and so on
        optimizer = SimpleNamespace(step=lambda *args, **kwargs: None, param_groups=[options], state={})
        outputs = output if isinstance(output, Mapping) else {"loss": output}  # as Lightning passes it
        arguments: dict[str, tuple[Any, ...]] = {
            "on_train_batch_start": (self._batch, 0),
            "optimizer_step": (0, 0, optimizer, lambda: None),
            "on_before_zero_grad": (optimizer,),
            "on_train_batch_end": (outputs, self._batch, 0),
        }
        # Each update of torch's averages asks for their count, which one stage will have. In the trace it may have its
        # value, as buffers of a module have that isn't called.
        counts = [
            (buffers_of(part), "n_averaged", absent_like(part.n_averaged, origin_of_parameter(f"{path}.n_averaged")))
            for path, part in self._module.named_modules()
            if isinstance(part, AveragedModel)
        ]
        trainer = self._module.trainer
        self._module.trainer = _Numbers(trainer)  # type: ignore[assignment]
        try:
            with changed(counts):
                for name, given in arguments.items():
                    try:
                        if is_overridden(name, self._module):
                            getattr(self._module, name)(*given)
                    except AbsentValueError as error:
                        found = (parameter_of(origin) for origin in error.origins)
                        self._asked |= {parameter: name for parameter in found if parameter is not None}
                    except Exception:  # any: what it needs isn't there yet. The run will tell
                        pass
        finally:
            self._module.trainer = trainer

    def check(self, partition: Partition, stage: int) -> None:
        """Refuse hooks that ask for the value of a parameter which another stage holds."""
        for parameter, hook in self._asked.items():
            holders = partition.holders_of(parameter)
            if stage not in holders:
                raise ValueError(
                    f"{hook} asks for the value of '{parameter}', which only stage {holders[0]} has, but it runs on "
                    f"all stages. Compute it in training_step, or use a strategy without stages."
                )


class _Numbers:
    """Gives a Trainer's numbers and texts, such as ``global_step``, and nothing else."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if value is None or isinstance(value, int | float | str):
            return value
        raise RuntimeError(f"trainer.{name} can't be used in the dry run of the first step.")
