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
            states[name] = _on(torch.device("cpu"), part.metric_state) | counts
    return states


def _on(device: torch.device, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: move_data_to_device(value, device) for name, value in state.items()}


def epoch_sums(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    """What ``self.log(..., on_epoch=True)`` has accumulated in this epoch of training, and how it was called, by a key
    of Lightning's. For metric objects it is their :func:`_states`."""
    sums = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta, sync = entry.meta, entry.meta.sync
        if entry.has_reset or not meta.on_epoch or sync.group is not None:  # a process group can't be saved
            continue
        how = {
            "fx": meta.fx, "name": meta.name, "prog_bar": meta.prog_bar, "logger": meta.logger,
            "on_step": meta.on_step, "on_epoch": True, "reduce_fx": meta.reduce_fx.__name__,
            "add_dataloader_idx": meta.add_dataloader_idx, "metric_attribute": meta.metric_attribute,
            "sync_dist": sync.should, "rank_zero_only": sync.rank_zero_only,
        }  # fmt: skip
        state = _on(torch.device("cpu"), entry.metric_state) if entry.is_tensor else _states(entry.value)
        sums[key] = {"how": how, "state": state, "is_tensor": entry.is_tensor}
    return sums


class ContinuedSums:
    """Adds what an earlier run had accumulated of an epoch's metrics to the rest of the epoch. Metric objects of the
    module get their state at once."""

    def __init__(self, trainer: pl.Trainer, sums: Mapping[str, Mapping[str, Any]]) -> None:
        self._trainer = trainer
        self._results = trainer.fit_loop.epoch_loop._results
        self._tensors: dict[str, Mapping[str, Any]] = {}
        self._objects: dict[str, Mapping[str, Any]] = {}
        for key, saved in sums.items():
            if saved["is_tensor"]:
                self._tensors[key] = saved
            elif isinstance(self._object(saved), Metric):
                self._objects[key] = saved
                self._fill(self._object(saved), saved["state"])
        self._results.log = self._log  # type: ignore[method-assign]

    def _object(self, saved: Mapping[str, Any]) -> Any:
        try:
            return self._trainer.lightning_module.get_submodule(saved["how"]["metric_attribute"] or "")
        except AttributeError:
            return None

    def _fill(self, metric: Metric, states: Mapping[str, Mapping[str, Any]]) -> None:
        parts = dict(metric.named_modules())
        for name, state in states.items():
            for attribute, value in _on(metric.device, state).items() if name in parts else ():
                setattr(parts[name], attribute, value)

    def _log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        type(self._results).log(self._results, fx, name, value, *args, **kwargs)
        key = f"{fx}.{name}"
        self._objects.pop(key, None)
        if key in self._tensors:
            self._add(self._results[key], self._tensors.pop(key))

    def _add(self, entry: Any, saved: Mapping[str, Any]) -> None:
        """Add the earlier sums to what the first batch has logged, unless that is of another kind."""
        if entry.is_tensor and entry.meta.reduce_fx.__name__ == saved["how"]["reduce_fx"]:
            is_sum = entry.meta.is_mean_reduction or entry.meta.is_sum_reduction
            both = torch.add if is_sum else entry.meta.reduce_fx
            for part, before in saved["state"].items():
                now = getattr(entry, part)
                setattr(entry, part, both(before.to(now.device), now))

    def end(self, *, logs: bool) -> None:
        """End the epoch, for which the run may have had no batch left. With ``logs``, this rank logs what nothing was
        added to."""
        del self._results.log
        for key, saved in [*self._tensors.items(), *self._objects.items()] if logs else []:
            how = {**saved["how"], "sync_dist_fn": self._trainer.strategy.reduce}
            value = torch.zeros(()) if saved["is_tensor"] else self._object(saved)
            self._results.log(value=value, batch_size=0, **how)
            if saved["is_tensor"]:
                for part, before in saved["state"].items():
                    setattr(self._results[key], part, before.to(self._trainer.strategy.root_device))
