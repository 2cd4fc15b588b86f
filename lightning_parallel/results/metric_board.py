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
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_parallel.private.lightning.metrics import evaluation_outputs, metrics_of_no_loader
from lightning_parallel.ranks.collectives import broadcast_object
from lightning_parallel.ranks.run import Run


def publish(run: Run, *, evaluation: bool = False) -> None:
    """Publish all metrics that the trainer has on the last stage to the other stages, at a point where all stages meet.
    At the end of an evaluation also what ``trainer.validate()`` is going to return. A collective."""
    trainer, is_source = run.trainer, run.layout.is_last_stage
    outputs = evaluation_outputs(trainer) if evaluation else []
    own: list[dict[str, Any]] = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
    places = [*own, *outputs]
    sent = None
    if is_source:
        rest = metrics_of_no_loader(trainer) if evaluation else {}
        sent = apply_to_collection([*own, *({**output, **rest} for output in outputs)], Tensor, _detached)
    metrics = broadcast_object(sent, run.last_rank, run.groups.along("pipeline"))
    if not is_source:
        for place, values in zip(places, metrics, strict=True):
            place.update(move_data_to_device(values, run.device))


def _detached(metric: Tensor) -> Tensor:
    """A copy that can be pickled by itself: a view would take the whole of its tensor along."""
    return metric.detach().cpu().clone()
