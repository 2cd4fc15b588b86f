"""The places in which Lightning and torchmetrics keep what was logged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor


def reads_training_metric(callback: Callback, global_step: int) -> bool:
    """May a checkpoint callback read a training metric after this step, to compare it or to name a file? Its triggers
    are private."""
    if not isinstance(callback, ModelCheckpoint):
        return False
    named = {*re.findall(r"{(\w+)", callback.filename or "")} - {"epoch", "step"}
    if callback.monitor is None and not named:
        return False
    every = callback._every_n_train_steps
    return (every >= 1 and global_step % every == 0) or callback._train_time_interval is not None


def step_metrics(trainer: pl.Trainer) -> tuple[dict[str, Tensor], ...]:
    """What the step that has just run leaves in :func:`metric_places`, without waiting for a GPU. Lightning would read
    what the progress bar shows, so the private marks for the progress bar are off meanwhile."""
    results = trainer._results
    if not results:
        return {}, {}, {}
    marked = [result for result in results.values() if result.meta.prog_bar]
    for result in marked:
        result.meta.prog_bar = False
    try:
        metrics = trainer._logger_connector.metrics
    finally:
        for result in marked:
            result.meta.prog_bar = True
    names = [results._forked_name(result, on_step=True)[1] for result in marked]
    callback: dict[str, Tensor] = metrics["callback"]
    return callback, metrics["log"], {name: callback[name] for name in names if name in callback}


def metric_places(trainer: pl.Trainer) -> tuple[dict[str, Any], ...]:
    """The attributes that hold ``trainer.callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``."""
    connector = trainer._logger_connector
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def replace_metric_places(trainer: pl.Trainer, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace each of :func:`metric_places` by what ``make`` returns for it."""
    connector = trainer._logger_connector
    connector._callback_metrics = make(connector._callback_metrics)
    connector._logged_metrics = make(connector._logged_metrics)
    connector._progress_bar_metrics = make(connector._progress_bar_metrics)


def logged_step(trainer: pl.Trainer) -> int:
    """The step under which loggers record what this batch logs. It counts updates; ``global_step`` counts the steps of
    all optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def show_in_progress_bar(trainer: pl.Trainer, texts: Mapping[str, str]) -> None:
    """Show texts in the progress bar until others replace them. ``self.log(prog_bar=True)`` shows numbers only, in
    hooks that all ranks reach together. So this writes to the dictionary that the bar reads; nothing promises that
    Lightning keeps that very one."""
    if trainer.progress_bar_callback is not None:
        shown: dict[str, Any] = trainer.progress_bar_metrics
        shown.update(texts)


def evaluation_outputs(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """What ``trainer.validate()`` is going to return: one dictionary for each data loader. At the end of an epoch the
    running loop holds it."""
    outputs: list[dict[str, Any]] = trainer._active_loop._logged_outputs  # type: ignore[union-attr]
    return outputs


def metrics_of_no_loader(trainer: pl.Trainer) -> dict[str, Any]:
    """What was logged at the end of an evaluation outside of any data loader. Lightning adds it to the outputs only
    after the hooks that read them here."""
    if trainer._results is None or trainer.sanity_checking:
        return {}
    found: dict[str, Any] = trainer._logger_connector.metrics["log"]
    return found


def step_value(metric: Any) -> Any:
    """What the last forward of a torchmetrics object returned. Lightning logs it as the object's value of the step."""
    return getattr(metric, "_forward_cache", None)


def set_step_value(metric: Any, value: Tensor) -> None:
    """Replace :func:`step_value`."""
    metric._forward_cache = value


def set_device(module: Any, device: torch.device) -> None:
    """If a module stores the device that ``module.device`` returns, change it. A copy of the module on another device
    needs this."""
    if "_device" in vars(module):
        module._device = device
