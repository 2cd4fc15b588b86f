"""Gives every stage the same metrics.

Only the last stage reaches the end of the user's step, so only it has a loss and something to log. Callbacks run on
every rank and read metrics there. A callback that decides differently on one rank (a checkpoint's monitor, early
stopping) would make the others wait forever. So the last stage alone logs, and publishes what it logged; the other
stages put it where Lightning's callbacks look::

    when                             who reads it
    a step after which a             ModelCheckpoint(every_n_train_steps)
    checkpoint reads a metric
    end of a training epoch          EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    end of validation, test          the same, and the caller of trainer.validate()

In between, metrics of steps are awaited when they are read (``late_values.py``).
``trainer.should_stop`` goes with the metrics, since code that runs on the last stage only may have set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.private.lightning.metrics import evaluation_outputs, metrics_of_no_loader
from lightning_parallel.ranks.collectives import broadcast_object
from lightning_parallel.ranks.run import Run


class MetricBoard:
    """Publishes the last stage's metrics to the other stages of a pipeline. Its methods are collectives."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def publish(self) -> None:
        """Publish all metrics that the trainer has, at a point where all stages meet."""
        self._publish([])

    def publish_evaluation(self) -> None:
        """Publish them at the end of an evaluation, with what ``trainer.validate()`` is going to return."""
        outputs = evaluation_outputs(self._run.trainer)
        if self._run.layout.is_last_stage:
            rest = metrics_of_no_loader(self._run.trainer)
            outputs = [{**output, **rest} for output in outputs]
        self._publish(outputs)

    def _publish(self, outputs: list[dict[str, Any]]) -> None:
        trainer, is_source = self._run.trainer, self._run.layout.is_last_stage
        own: list[dict[str, Any]] = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        places = [*own, *outputs]
        sent = ([_detached(place) for place in places], trainer.should_stop) if is_source else None
        group = self._run.groups.along("pipeline")
        metrics, stop = broadcast_object(sent, self._run.last_rank, group)
        if is_source:
            return
        for place, values in zip(places, metrics, strict=True):
            place.update({name: _moved(value, self._run.device) for name, value in values.items()})
        trainer.should_stop = trainer.should_stop or stop


def _detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that can be pickled by itself: a view would take the whole of its tensor along."""
    return {n: v.detach().cpu().clone() if isinstance(v, Tensor) else v for n, v in metrics.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
