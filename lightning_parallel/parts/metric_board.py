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
from lightning_parallel.lightning_private import evaluation_outputs, metrics_of_no_loader, step_metrics

_CPU = torch.device("cpu")
_LOSS = ""  # its name in a message; no metric has this name


class MetricBoard:
    """Publishes the last stage's metrics to the other stages of a pipeline. Its methods are collectives.

    Args:
        trainer: whose metrics they are.
        group: the ranks of this pipeline.
        host_group: the same ranks, for what the host reads; ``group`` itself, unless its backend is NCCL.
        source: the global rank of the last stage among them.
        device: where tensors of a broadcast over ``group`` have to be.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        source: int,
        device: torch.device,
    ) -> None:
        self._trainer = trainer
        self._group, self._host_group = group, host_group
        self._source = source
        self._device = device
        self._is_source = dist.get_rank() == source
        self._form: list[tuple[str, torch.dtype]] = []  # of the metrics that a step publishes, as last announced
        self._sending: list[tuple[dist.Work, Tensor]] = []

    # -- a step --------------------------------------------------------------------------------------------------

    def publish_step(self, loss: Tensor | None) -> Tensor:
        """After a synchronous step: the loss, and the callback metrics. The source doesn't wait for the others.

        Values travel as float64, which holds any float exactly. Names and dtypes are announced only when they change::

            [ changed?, stop?, value, value, ... ]     then, if they changed, the new names, and the new values

        Over NCCL the two flags go apart, from host to host, so that no host waits for a GPU.

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
        metrics = {_LOSS: loss, **step_metrics(self._trainer)}
        form = [(name, value.dtype) for name, value in metrics.items()]
        values = torch.stack([_as_float64(value, self._device) for value in metrics.values()])
        changed = form != self._form
        flags = torch.tensor([changed, self._trainer.should_stop], dtype=torch.float64)
        # The others expect as many values as were announced last.
        self._send(flags, torch.zeros(len(self._form), dtype=torch.float64, device=self._device) if changed else values)
        if changed:
            self._form = broadcast_object(form, self._source, self._host_group, _CPU)
            self._post(values, self._group)
        return loss.detach()

    def _receive_step(self) -> Tensor:
        (changed, stop), values = self._receive(len(self._form))
        if changed:
            self._form = broadcast_object(self._form, self._source, self._host_group, _CPU)
            values = self._take(len(self._form), self._group, self._device)
        # Copies: no metric is a view of the message.
        received = {name: value.to(dtype, copy=True) for (name, dtype), value in zip(self._form, values, strict=True)}
        loss = received.pop(_LOSS)
        self._trainer.callback_metrics.update(received)
        self._trainer.should_stop = self._trainer.should_stop or bool(stop)
        return loss

    def _send(self, flags: Tensor, values: Tensor) -> None:
        if self._host_group is self._group:
            self._post(torch.cat([flags.to(self._device), values]), self._group)
        else:
            self._post(flags, self._host_group)
            self._post(values, self._group)

    def _receive(self, count: int) -> tuple[list[float], Tensor]:
        if self._host_group is self._group:
            message = self._take(2 + count, self._group, self._device)
            return message[:2].tolist(), message[2:]
        return self._take(2, self._host_group, _CPU).tolist(), self._take(count, self._group, self._device)

    def _post(self, message: Tensor, group: dist.ProcessGroup) -> None:
        work = guarded(dist.broadcast, message, self._source, group, async_op=True)
        assert work is not None, "the source is a member of its group"
        self._sending.append((work, message))

    def _take(self, count: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        message = torch.empty(count, dtype=torch.float64, device=device)
        guarded(dist.broadcast, message, self._source, group)
        return message

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


def _as_float64(value: Tensor, device: torch.device) -> Tensor:
    """A scalar as it travels. The host doesn't wait for it."""
    return value.detach().to(device, torch.float64, non_blocking=True).reshape(())


def _detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Ready to be pickled: a view would take the whole of its tensor along."""
    return {n: v.detach().cpu().clone() if isinstance(v, Tensor) else v for n, v in metrics.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
