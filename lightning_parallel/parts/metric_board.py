"""The same metrics on every stage.

Only the last stage reaches the end of the user's step, so only it has a loss and something to log. Callbacks run on
every rank and read metrics there. A callback that decides differently on one rank (a checkpoint's monitor, early
stopping) would make the others wait forever. So the last stage alone logs, and publishes what it logged; the other
stages put it where Lightning's callbacks look::

    when                             who reads it
    each synchronous step            callbacks' on_train_batch_end, ReduceLROnPlateau(interval="step")
    a step at which a checkpoint     ModelCheckpoint(every_n_train_steps)
    or scheduler reads a metric
    end of a training epoch          EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    end of validation, test          the same, and the caller of trainer.validate()

``trainer.should_stop`` goes with the metrics, since code that runs on the last stage only may have set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives import broadcast_object, guarded
from lightning_parallel.lightning_private import evaluation_outputs, metrics_of_no_loader

_LOSS = ""  # its name in a message; no metric has this name


class MetricBoard:
    """Publishes the last stage's metrics to the other stages of a pipeline. Its methods are collectives.

    Args:
        trainer: whose metrics they are.
        group: the ranks of this pipeline.
        source: the global rank of the last stage among them.
        device: where tensors of a broadcast have to be.
    """

    def __init__(self, trainer: pl.Trainer, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._trainer = trainer
        self._group = group
        self._source = source
        self._device = device
        self._is_source = dist.get_rank() == source
        self._form: list[tuple[str, torch.dtype]] = []  # of the metrics that a step publishes, as last announced
        self._sending: list[tuple[dist.Work, Tensor]] = []

    # -- a step --------------------------------------------------------------------------------------------------

    def publish_step(self, loss: Tensor | None) -> Tensor:
        """After a synchronous step: the loss, and the callback metrics. The source doesn't wait for the others.

        One message of float64 holds any float exactly. Names and dtypes are announced only when they change::

            [ changed?, stop?, value, value, ... ]     then, if they changed, the new names, and the new values

        Args:
            loss: on the last stage, the batch's loss; None elsewhere.

        Returns:
            The loss, on every stage.
        """
        for work, _ in self._sending:
            guarded(work.wait)
        self._sending = []
        return self._send_step(loss) if loss is not None else self._receive_step()

    def _send_step(self, loss: Tensor) -> Tensor:
        metrics = {_LOSS: loss, **self._trainer.callback_metrics}
        form = [(name, value.dtype) for name, value in metrics.items()]
        values = [float(value) for value in metrics.values()]
        changed = form != self._form
        # The others expect as many values as were announced last.
        first = [0.0] * len(self._form) if changed else values
        self._send([float(changed), float(self._trainer.should_stop), *first])
        if changed:
            self._form = broadcast_object(form, self._source, self._group, self._device)
            self._send(values)
        return loss.detach()

    def _receive_step(self) -> Tensor:
        changed, stop, *values = self._receive(2 + len(self._form))
        if changed:
            self._form = broadcast_object(self._form, self._source, self._group, self._device)
            values = self._receive(len(self._form))
        received = {
            name: torch.tensor(value, dtype=dtype, device=self._device)
            for (name, dtype), value in zip(self._form, values, strict=True)
        }
        loss = received.pop(_LOSS)
        self._trainer.callback_metrics.update(received)
        self._trainer.should_stop = self._trainer.should_stop or bool(stop)
        return loss

    def _send(self, values: list[float]) -> None:
        message = torch.tensor(values, dtype=torch.float64, device=self._device)
        work = guarded(dist.broadcast, message, self._source, self._group, async_op=True)
        assert work is not None, "the source is a member of its group"
        self._sending.append((work, message))

    def _receive(self, count: int) -> list[float]:
        message = torch.empty(count, dtype=torch.float64, device=self._device)
        guarded(dist.broadcast, message, self._source, self._group)
        return list(message.tolist())

    # -- an epoch ------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """At a point where all stages meet: all metrics that the trainer has."""
        self._publish([])

    def publish_evaluation(self) -> None:
        """The same at the end of an evaluation, with what ``trainer.validate()`` is going to return."""
        outputs = evaluation_outputs(self._trainer)
        if self._is_source:
            rest = metrics_of_no_loader(self._trainer)
            outputs = [{**output, **rest} for output in outputs]
        self._publish(outputs)

    def _publish(self, outputs: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        own: list[dict[str, Any]] = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        places = [*own, *outputs]
        sent = ([_detached(place) for place in places], trainer.should_stop) if self._is_source else None
        metrics, stop = broadcast_object(sent, self._source, self._group, self._device)
        if self._is_source:
            return
        for place, values in zip(places, metrics, strict=True):
            place.update({name: _moved(value, self._device) for name, value in values.items()})
        trainer.should_stop = trainer.should_stop or stop


def _detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Ready to be pickled: a view would take the whole of its tensor along."""
    return {n: v.detach().cpu().clone() if isinstance(v, Tensor) else v for n, v in metrics.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
