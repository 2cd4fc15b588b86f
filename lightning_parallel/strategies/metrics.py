"""The same metrics on every stage.

Only the last stage reaches the end of the user's step, so only it has a loss and something to log. Callbacks run on
every rank and read metrics there, and one that decides differently on one rank (a checkpoint monitor, early stopping)
would hang the others. So the last stage alone logs, and publishes what it logged; the other stages put it where
Lightning's callbacks look:

    when                             who reads it
    each synchronous step            callbacks' on_train_batch_end, ReduceLROnPlateau(interval="step")
    a step at which a checkpoint     ModelCheckpoint(every_n_train_steps)
    or scheduler reads a metric
    end of a training epoch          EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    end of validation, test          the same, and the caller of trainer.validate()

With the metrics goes ``trainer.should_stop``, which code that runs on the last stage only may have set.

The LightningModule's own ``on_..._epoch_end`` hooks work on what its steps gathered (a list of outputs, a metric), and
its ``on_validation_batch_end`` on what ``validation_step`` returned. Both exist on the last stage alone: these hooks
run there, and what they log is published. ``on_train_batch_end`` runs everywhere, since it may look after the weights
(a moving average); of what ``training_step`` returned, the other stages have the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel.pipeline.channel import PeerLostError

EPOCH_END_HOOKS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
_LOSS = ""  # its name in a message; no metric is called so
OUTPUT_HOOKS = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
WRAPPED_HOOKS = (*EPOCH_END_HOOKS, *OUTPUT_HOOKS, "on_train_batch_end")


class MetricBoard:
    """Publishes the last stage's metrics to the other stages of a pipeline. Its methods are collectives.

    Args:
        trainer: whose metrics.
        group: the ranks of this pipeline.
        source: global rank of the last stage among them.
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

    def publish_step(self, loss: Tensor | None) -> Tensor:
        """After a synchronous step: the loss, and the callback metrics. The source doesn't wait for the others.

        One message of float64, which holds any float exactly; names and dtypes are announced only when they change.

        Args:
            loss: on the last stage, the batch's loss; None elsewhere.

        Returns:
            The loss, on every stage.
        """
        with named_loss_of_peers():
            return self._publish_step(loss)

    def _publish_step(self, loss: Tensor | None) -> Tensor:
        for work, _ in self._sending:
            work.wait()
        self._sending = []
        trainer = self._trainer
        if self._is_source:
            assert loss is not None
            metrics = {_LOSS: loss, **trainer.callback_metrics}
            form = [(name, value.dtype) for name, value in metrics.items()]
            values = [float(value) for value in metrics.values()]
            changed = form != self._form
            # The others expect as many values as were announced last: new names and values go after the old form.
            self._send([float(changed), float(trainer.should_stop), *([0.0] * len(self._form) if changed else values)])
            if changed:
                self._form = self._broadcast(form)
                self._send(values)
            return loss.detach()
        announcement, stop, *values = self._receive(2 + len(self._form))
        if announcement:
            self._form = self._broadcast(None)
            values = self._receive(len(self._form))
        received = {
            name: torch.tensor(value, dtype=dtype, device=self._device)
            for (name, dtype), value in zip(self._form, values, strict=True)
        }
        loss = received.pop(_LOSS)
        trainer.callback_metrics.update(received)
        trainer.should_stop = trainer.should_stop or bool(stop)
        return loss

    def _send(self, values: list[float]) -> None:
        message = torch.tensor(values, dtype=torch.float64, device=self._device)
        work = dist.broadcast(message, self._source, self._group, async_op=True)
        assert work is not None, "the source is a member of its group"
        self._sending.append((work, message))

    def _receive(self, count: int) -> list[float]:
        message = torch.empty(count, dtype=torch.float64, device=self._device)
        dist.broadcast(message, self._source, self._group)
        return list(message.tolist())

    def publish(self) -> None:
        """At a point where all stages meet: all that the trainer tells of metrics."""
        self._publish([])

    def publish_evaluation(self) -> None:
        """The same at the end of an evaluation, with what ``trainer.validate()`` returns."""
        trainer = self._trainer
        loop: Any = trainer._active_loop
        outputs: list[dict[str, Any]] = loop._logged_outputs  # one a data loader
        if self._is_source and trainer._results and not trainer.sanity_checking:
            # Lightning adds to them, after this hook, what was logged for no data loader in particular.
            rest = trainer._logger_connector.metrics["log"]
            outputs = [{**output, **rest} for output in outputs]
        self._publish(outputs)

    def _publish(self, outputs: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        own: list[dict[str, Any]] = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        places = [*own, *outputs]
        mine = ([_detached(place) for place in places], trainer.should_stop) if self._is_source else None
        with named_loss_of_peers():
            metrics, stop = self._broadcast(mine)
        if self._is_source:
            return
        for place, values in zip(places, metrics, strict=True):
            place.update({name: _moved(value, self._device) for name, value in values.items()})
        trainer.should_stop = trainer.should_stop or stop

    def _broadcast(self, value: Any) -> Any:
        boxed = [value]
        dist.broadcast_object_list(boxed, self._source, self._group)
        return boxed[0]


def _detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Ready to be pickled: a view would take the whole of its tensor along."""
    return {n: v.detach().cpu().clone() if isinstance(v, Tensor) else v for n, v in metrics.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def named_loss_of_peers() -> Iterator[None]:
    """A collective that breaks says why: some rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            "A collective of all stages broke: one of them stopped, or did not answer within the timeout. The cause "
            "is in its own output."
        ) from error


class PublishMetrics(Callback):
    """First among the callbacks: when the others read metrics at the end of an epoch, every stage has them."""

    def __init__(self, publish: Callable[[str], None], failed: Callable[[BaseException], None]) -> None:
        self._publish = publish
        self._failed = failed

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_train_batch_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_train_epoch_end")

    def on_validation_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_validation_epoch_end")

    def on_test_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_test_epoch_end")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        # Before the other callbacks', one of which may want to save a checkpoint, for which all ranks would meet.
        self._failed(exception)


class LossOnly(dict[str, Any]):
    """What ``training_step`` returned, on a stage that isn't the last."""

    def __missing__(self, key: str) -> Any:
        raise RuntimeError(
            f"on_train_batch_end looks at {key!r} of what training_step returned, which exists on the last pipeline "
            f"stage only (global rank 0). Do this in training_step, or under `if self.trainer.is_global_zero:`."
        )


@contextmanager
def logging_through(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """``self.log`` is ``log`` inside. An instance attribute, since there is no argument by which to pass it."""
    before = module.__dict__.get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.log
        else:
            module.log = before  # type: ignore[method-assign]


def discard(*args: Any, **kwargs: Any) -> None:
    """``self.log`` on a stage that isn't the last, which logs for all: a step is cut before its end, and what hooks
    find here (a norm of gradients) may be another value."""


def wrap_hooks(module: pl.LightningModule, wrapper: Callable[..., None]) -> None:
    """Let ``wrapper(name, hook, *args)`` decide on the module's hooks that work on what its steps made. Undone by
    :func:`unwrap_hooks`."""
    for name in WRAPPED_HOOKS:
        hook = getattr(module, name)

        def wrapped(*args: Any, name: str = name, hook: Callable[..., Any] = hook) -> None:
            wrapper(name, hook, *args)

        # `wraps` lets Lightning see whether the user has overridden the hook, and what arguments it takes.
        setattr(module, name, functools.wraps(hook)(wrapped))


def unwrap_hooks(module: pl.LightningModule) -> None:
    for name in WRAPPED_HOOKS:
        module.__dict__.pop(name, None)
