"""``self.log`` inside microbatches: for each name one value, the one that the undivided batch would have logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_parallel.batch import weighted_mean
from lightning_parallel.lightning_private import set_step_value, step_value

# What reduce_fx may be, as a name or as a function.
_SUM = ("sum", sum, torch.sum)
_MAX = ("max", max, torch.max)
_MIN = ("min", min, torch.min)


@dataclass(slots=True)
class _Entry:
    """What was logged under one name, a list item for each microbatch.

    Attributes:
        options: of the first call.
        values: as logged.
        step_values: of metric objects, what their last forward returned.
        weights: the sizes of the microbatches.
        given: ``batch_size=`` as the user passed it.
        by_samples: the mean is weighted by samples, whatever was given.
    """

    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    step_values: list[Any] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    given: list[int | None] = field(default_factory=list)
    by_samples: bool = False


class LogRecorder:
    """Stands in for ``LightningModule.log`` while microbatches run.

    ::

        recorder = LogRecorder()
        with logging_through(module, recorder.log):     # log_dict calls it too
            for size, microbatch in ...:
                recorder.weight = size
                module.training_step(microbatch, batch_idx)
        recorder.replay(module.log)

    Tensors and numbers become their mean, weighted by microbatch size, or by ``batch_size=`` where the user gives it (a
    loss per token is then weighted by tokens). With ``reduce_fx`` "sum", "max" or "min" they become their sum, maximum
    or minimum. Objects of torchmetrics keep their own state and are passed on once: their value over the epoch is that
    of all samples, and their value of this step is the weighted mean of the microbatches'.

    Attributes:
        weight: the size of the microbatch that runs.
        loss_weights: of the losses of all microbatches, where they aren't weighted by samples.
        counts_by_samples: does a value that is logged have the samples as its weight, whatever ``batch_size=`` says?
    """

    def __init__(self) -> None:
        self.weight = 1
        self.loss_weights: list[float] = []
        self.counts_by_samples: Callable[[Any], bool] = lambda value: False
        self._entries: dict[str, _Entry] = {}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Keep one value of the current microbatch; parameters as for ``LightningModule.log``."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(
                {
                    "prog_bar": prog_bar,
                    "logger": logger,
                    "on_step": on_step,
                    "on_epoch": on_epoch,
                    "reduce_fx": reduce_fx,
                    "enable_graph": enable_graph,
                    "sync_dist": sync_dist,
                    "sync_dist_group": sync_dist_group,
                    "add_dataloader_idx": add_dataloader_idx,
                    "metric_attribute": metric_attribute,
                    "rank_zero_only": rank_zero_only,
                }
            )
        # A copy, as Lightning makes: the step may change the tensor afterwards. Detached, or graphs would pile up.
        entry.by_samples |= self.counts_by_samples(value)
        entry.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        entry.step_values.append(step_value(value))
        entry.weights.append(self.weight)
        entry.given.append(batch_size)

    def extend(self, other: LogRecorder) -> None:
        """Take what another recorder has kept, as if it had been logged here after what is here."""
        for name, entry in other._entries.items():
            own = self._entries.setdefault(name, _Entry(entry.options))
            own.values += entry.values
            own.step_values += entry.step_values
            own.weights += entry.weights
            own.given += entry.given
            own.by_samples |= entry.by_samples

    def replay(self, log: Callable[..., None], losses: Sequence[Tensor] = ()) -> None:
        """Log each name once, in the order of the first calls, and forget everything.

        Args:
            log: the real ``LightningModule.log``.
            losses: of the microbatches. What equals them is weighted as they are.
        """
        entries, self._entries = self._entries, {}
        for name, entry in entries.items():
            weights: Sequence[float] = entry.weights
            size = sum(entry.weights)
            if None not in entry.given:
                given = [size for size in entry.given if size is not None]
                # One number for microbatches of different sizes is a setting, not a count of what is in each.
                if len(set(given)) > 1 or len(set(weights)) == 1:
                    weights, size = weights if entry.by_samples else given, sum(given)
            if self.loss_weights != entry.weights and _are(entry.values, losses):
                weights = self.loss_weights
            log(name, _reduced(entry, weights), batch_size=size, **entry.options)


def _are(values: Sequence[Any], losses: Sequence[Tensor]) -> bool:
    """Are the values that were logged the losses?"""
    if len(values) != len(losses) or not all(isinstance(value, Tensor | float) for value in values):
        return False
    return all(
        bool(torch.isclose(torch.as_tensor(value, device=loss.device, dtype=loss.dtype), loss, 1e-6, 0, True).all())
        for value, loss in zip(values, losses, strict=True)
    )


def _reduced(entry: _Entry, weights: Sequence[float]) -> Any:
    values, how = entry.values, entry.options["reduce_fx"]
    how = how.lower() if isinstance(how, str) else how
    if not any(isinstance(value, Tensor) for value in values) and not all(isinstance(value, Real) for value in values):
        if all(isinstance(value, Tensor) and value.numel() == 1 for value in entry.step_values):
            # The metric's forward kept the value of the last microbatch.
            set_step_value(values[-1], weighted_mean(entry.step_values, weights))
        return values[-1]
    if not all(value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real) for value in values):
        return values[-1]  # which Lightning refuses, in its own words
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    if device is None:
        return _reduced_numbers(values, weights, how)
    scalars = [torch.as_tensor(value, device=device).reshape(()) for value in values]
    if how in _SUM:
        return torch.stack(scalars).sum()
    if how in _MAX:
        return torch.stack(scalars).max()
    if how in _MIN:
        return torch.stack(scalars).min()
    return weighted_mean(scalars, weights)


def _reduced_numbers(values: list[Any], weights: Sequence[float], how: Any) -> Any:
    if how in _SUM:
        return sum(values)
    if how in _MAX:
        return max(values)
    if how in _MIN:
        return min(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


@contextmanager
def logging_through(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Inside, ``self.log`` is ``log``. It is an instance attribute, since no argument could carry it."""
    before = vars(module).get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.log
        else:
            module.log = before  # type: ignore[method-assign]


@contextmanager
def trial(
    trainer: pl.Trainer, module: pl.LightningModule, log: Callable[..., None] = lambda *args, **kwargs: None
) -> Iterator[None]:
    """Inside, a step doesn't count: what it logs goes to ``log``, and it doesn't end the training. The step itself will
    do both again."""
    stop = trainer.should_stop
    try:
        with logging_through(module, log):
            yield
    finally:
        trainer.should_stop = stop


@contextmanager
def logging_trial(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[tuple[Any, ...]]]:
    """:func:`trial`, which keeps what the step logs, with the arguments of the calls, in the list that it gives."""
    logged: list[tuple[Any, ...]] = []

    def keep(*args: Any, **kwargs: Any) -> None:
        logged.append((args, kwargs))

    with trial(trainer, module, keep):
        yield logged
