"""The same metrics on every stage.

Only the last stage reaches the end of the user's step, so only it has a loss and logs. Callbacks run on every rank
and read metrics there, and one that decides differently on one rank (a checkpoint monitor, early stopping) would hang
the others. So the last stage publishes what it logged, and the other stages put it where Lightning's callbacks look:

    when                             who reads it
    each synchronous step            ModelCheckpoint(every_n_train_steps), ReduceLROnPlateau(interval="step")
    end of a training epoch          EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    end of validation, test          the same, and the caller of trainer.validate()

The LightningModule's own ``on_..._epoch_end`` hooks work on what its steps gathered (a list of outputs, a metric),
which exists on the last stage alone: they run there, and what they log is published.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

EPOCH_END_HOOKS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")


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
        self._names: list[str] = []  # of the metrics that a step publishes, as last announced
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._before: dict[str, Any] = {}
        self._replayed: set[str] = set()

    def publish_step(self, loss: Tensor | None) -> Tensor:
        """After a synchronous step: the loss, and the callback metrics. The source doesn't wait for the others.

        One message of float64, which holds any float exactly; names are announced only when they change.

        Args:
            loss: on the last stage, the batch's loss; None elsewhere.

        Returns:
            The loss, on every stage.
        """
        for work, _ in self._sending:
            work.wait()
        self._sending = []
        if self._is_source:
            assert loss is not None
            metrics = _scalars(self._trainer.callback_metrics)
            changed = list(metrics) != self._names
            # The others expect as many values as were announced last: new names and values go after the old form.
            values = [0.0] * len(self._names) if changed else list(metrics.values())
            self._send([float(changed), float(loss), *values])
            if changed:
                self._names = self._share(list(metrics))
                self._send(list(metrics.values()))
            return loss.detach()
        announcement, value, *values = self._receive(2 + len(self._names))
        if announcement:
            self._names = self._share(None)
            values = self._receive(len(self._names))
        self._trainer.callback_metrics.update(_tensors(self._names, values, self._device))
        return torch.tensor(value, device=self._device)

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
        """At a point where all stages meet: callback and logger metrics."""
        trainer = self._trainer
        mine = [_scalars(trainer.callback_metrics), _scalars(trainer.logged_metrics)] if self._is_source else None
        places = (trainer.callback_metrics, trainer.logged_metrics)
        for place, values in zip(places, self._share(mine), strict=True):
            if not self._is_source:
                place.update(_tensors(values, values.values(), self._device))

    def evaluation_starts(self) -> None:
        """From here on, what the last stage logs belongs to this evaluation."""
        self._before = dict(self._trainer.callback_metrics)
        self._replayed = set()

    def publish_evaluation(self) -> None:
        """At the end of an evaluation: the other stages log what the last one did, so that ``trainer.validate()``
        returns it there too."""
        trainer = self._trainer
        new: dict[str, float] = {}
        if self._is_source:
            now = dict(trainer.callback_metrics)
            new = _scalars({name: value for name, value in now.items() if self._before.get(name) is not value})
        new = self._share(new)
        if self._is_source:
            return
        for name, value in new.items():
            if name not in self._replayed and "/dataloader_idx_" not in name:  # such a name is Lightning's to make
                trainer.lightning_module.log(name, value, on_step=False, on_epoch=True, batch_size=1)
                self._replayed.add(name)
            trainer.callback_metrics[name] = torch.tensor(value, device=self._device)

    def _share(self, value: Any) -> Any:
        boxed = [value]
        dist.broadcast_object_list(boxed, self._source, self._group)
        return boxed[0]


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _tensors(names: Iterable[str], values: Iterable[float], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.tensor(value, device=device) for name, value in zip(names, values, strict=True)}


class PublishMetrics(Callback):
    """First among the callbacks: when the others read metrics at the end of an epoch, every stage has them."""

    def __init__(self, publish: Callable[[str], None]) -> None:
        self._publish = publish

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_train_batch_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_train_epoch_end")

    def on_validation_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_validation_epoch_end")

    def on_test_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._publish("on_test_epoch_end")


@contextmanager
def logging_through(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """``self.log`` is ``log`` inside. An instance attribute, since there is no argument by which to pass it."""
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log


def discard(*args: Any, **kwargs: Any) -> None:
    """``self.log`` in a step that is cut before its end: the last stage logs for all."""


def wrap_epoch_end_hooks(module: pl.LightningModule, wrapper: Callable[[str, Callable[[], None]], None]) -> None:
    """Let ``wrapper(name, hook)`` decide on the module's epoch-end hooks. Undone by :func:`unwrap_epoch_end_hooks`."""
    for name in EPOCH_END_HOOKS:
        hook = getattr(module, name)

        def wrapped(name: str = name, hook: Callable[[], None] = hook) -> None:
            wrapper(name, hook)

        # `wraps` lets Lightning see whether the user has overridden the hook.
        setattr(module, name, functools.wraps(hook)(wrapped))


def unwrap_epoch_end_hooks(module: pl.LightningModule) -> None:
    for name in EPOCH_END_HOOKS:
        module.__dict__.pop(name, None)
