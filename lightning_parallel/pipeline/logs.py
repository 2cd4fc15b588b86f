"""`self.log` inside microbatches: one value a name, the one that the undivided batch would have logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.microbatch import weighted_mean

_SUM = ("sum", sum, torch.sum)
_MAX = ("max", max, torch.max)
_MIN = ("min", min, torch.min)


@dataclass(slots=True)
class _Entry:
    options: dict[str, Any]  # of the first call
    values: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)  # of metric objects: what their last forward returned
    weights: list[int] = field(default_factory=list)  # microbatch sizes
    given: list[int | None] = field(default_factory=list)  # batch_size=, as the user passed it


class LogRecorder:
    """Stands in for `LightningModule.log` while microbatches run.

    ::

        recorder = LogRecorder()
        module.log = recorder.log                # log_dict calls it too
        for size, microbatch in ...:
            recorder.weight = size
            module.training_step(microbatch, batch_idx)
        del module.log
        recorder.replay(module.log)

    Tensors and numbers become their mean, weighted by microbatch size, or by `batch_size=` where the user
    gives it (a loss per token is weighted by tokens then); with `reduce_fx` "sum", "max" or "min" their sum,
    maximum or minimum. torchmetrics' objects, which keep their own state, are passed on once: their value over the
    epoch is that of all samples, and their value of this step the weighted mean of the microbatches'.
    """

    def __init__(self) -> None:
        self.weight = 1
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
        """Keep one value of the current microbatch; parameters as for `LightningModule.log`."""
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
        # A copy, as Lightning makes: the step may go on to change the tensor. Detached: graphs would pile up.
        entry.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        entry.caches.append(getattr(value, "_forward_cache", None))
        entry.weights.append(self.weight)
        entry.given.append(batch_size)

    def extend(self, other: LogRecorder) -> None:
        """Take what another recorder has kept, as if it had been logged here after what is here."""
        for name, entry in other._entries.items():
            mine = self._entries.setdefault(name, _Entry(entry.options))
            mine.values += entry.values
            mine.caches += entry.caches
            mine.weights += entry.weights
            mine.given += entry.given

    def replay(self, log: Callable[..., None]) -> None:
        """Log each name once, in the order of the first calls, and forget all.

        Args:
            log: the real `LightningModule.log`.
        """
        entries, self._entries = self._entries, {}
        for name, entry in entries.items():
            weights = entry.weights
            if None not in entry.given:
                given = [size for size in entry.given if size is not None]
                # One number for microbatches of different sizes is a setting, not a count of what is in each.
                if len(set(given)) > 1 or len(set(weights)) == 1:
                    weights = given
            log(name, _reduce(entry, weights), batch_size=sum(weights), **entry.options)


def _reduce(entry: _Entry, weights: list[int]) -> Any:
    values, how = entry.values, entry.options["reduce_fx"]
    how = how.lower() if isinstance(how, str) else how
    if any(isinstance(value, Tensor) for value in values):
        if not all(value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real) for value in values):
            return values[-1]  # which Lightning refuses, in its own words
        device = next(value.device for value in values if isinstance(value, Tensor))
        tensors = [torch.as_tensor(value, device=device).reshape(()) for value in values]
        return _reduce_tensors(tensors, weights, how)
    if not all(isinstance(value, Real) for value in values):
        if all(isinstance(cache, Tensor) and cache.numel() == 1 for cache in entry.caches):
            # Where Lightning looks for a metric's value of this step; its forward kept that of the last microbatch.
            values[-1]._forward_cache = weighted_mean(entry.caches, weights)
        return values[-1]
    if how in _SUM:
        return sum(values)
    if how in _MAX:
        return max(values)
    if how in _MIN:
        return min(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _reduce_tensors(tensors: list[Tensor], weights: list[int], how: Any) -> Tensor:
    if how in _SUM:
        return torch.stack(tensors).sum()
    if how in _MAX:
        return torch.stack(tensors).max()
    if how in _MIN:
        return torch.stack(tensors).min()
    return weighted_mean(tensors, weights)
