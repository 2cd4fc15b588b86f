"""The places in which Lightning and torchmetrics keep what was logged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torchmetrics import Metric

_COUNTERS = ("_update_count", "_num_vals_seen")  # of a metric whose result depends on them, and of Running's


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


# -- what self.log(on_epoch=True) has accumulated in an epoch ----------------------------------------------------


def _states(metric: Metric) -> dict[str, dict[str, Any]]:
    """The state tensors, and the count of updates, of a metric object and of those that it wraps, by name."""
    states = {}
    for name, part in metric.named_modules():
        if isinstance(part, Metric):
            counts = {counter: getattr(part, counter) for counter in _COUNTERS if hasattr(part, counter)}
            states[name] = move_data_to_device(part.metric_state, torch.device("cpu")) | counts
    return states


def epoch_sums(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    """What ``self.log(..., on_epoch=True)`` has accumulated in this epoch of training, and how it was called, by a key
    of Lightning's. For metric objects it is their :func:`_states`."""
    sums = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta, sync, reduction = entry.meta, entry.meta.sync, entry.meta.reduce_fx.__name__
        # A process group can't be saved, and a reduction is saved by its name.
        if entry.has_reset or not meta.on_epoch or sync.group or meta.reduce_fx is not vars(torch).get(reduction):
            continue
        how = {
            "fx": meta.fx, "name": meta.name, "prog_bar": meta.prog_bar, "logger": meta.logger,
            "on_step": meta.on_step, "on_epoch": True, "reduce_fx": reduction, "enable_graph": meta.enable_graph,
            "add_dataloader_idx": meta.add_dataloader_idx, "metric_attribute": meta.metric_attribute,
            "sync_dist": sync.should, "rank_zero_only": sync.rank_zero_only,
        }  # fmt: skip
        states = _states(entry if entry.is_tensor else entry.value)
        sums[key] = {"how": how, "states": states, "is_tensor": entry.is_tensor}
    return sums


def continue_sums(trainer: pl.Trainer, sums: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what :func:`epoch_sums` returned, before the first batch of a run that goes on in the middle of an
    epoch. Metric objects are those of the module."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    trainer._logger_connector._first_loop_iter = False  # the first batch of an epoch would reset what was logged
    modules = dict(trainer.lightning_module.named_modules())
    for key, saved in sums.items():
        is_tensor, how = saved["is_tensor"], saved["how"]
        value: Any = torch.zeros((), device=device) if is_tensor else modules.get(how["metric_attribute"])
        if not is_tensor and not isinstance(value, Metric):  # the module has no such metric any more
            continue
        results.log(value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **how)
        results[key]._forward_cache = None  # of no step yet
        parts = dict((results[key] if is_tensor else value).named_modules())
        for name in saved["states"].keys() & parts.keys():
            for attribute, content in move_data_to_device(saved["states"][name], device).items():
                setattr(parts[name], attribute, content)
