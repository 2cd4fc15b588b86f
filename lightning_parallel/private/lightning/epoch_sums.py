"""What ``self.log(on_epoch=True)`` has accumulated in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torchmetrics import Metric

_COUNTERS = ("_update_count", "_num_vals_seen")  # of a metric whose result depends on them, and of Running's


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
