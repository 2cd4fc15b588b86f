"""``self.log`` inside microbatches: logs for each name the one value that the undivided batch would have logged.

What ``training_step`` writes to a logger by itself is written for each microbatch, and in a dry run it would be made
up. So stand-ins take the loggers' places::

    self.log("loss", loss)                              one value for the batch, whatever the number of microbatches
    self.logger.log_metrics({"loss": loss.item()})      through the stand-in
    self.logger.experiment.add_image(...)
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_parallel.batch_joins import weighted_mean
from lightning_parallel.losses.graph import Number
from lightning_parallel.losses.normaliser import BatchLoss, Rule
from lightning_parallel.private.lightning.metrics import set_step_value, step_value
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.ranks.user_collectives import Collectives
from lightning_parallel.results.log_joins import LogJoins


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of ``self.log``.

    Attributes:
        value: as it was logged.
        step_value: what the last forward of a metric object returned.
        weight: the size of the microbatch.
        given: the user's ``batch_size=``.
        options: the other arguments.
    """

    value: Any
    step_value: Any
    weight: int
    given: int | None
    options: dict[str, Any]


_LOG = inspect.signature(pl.LightningModule.log)
_DEFAULTS = {name: parameter.default for name, parameter in _LOG.parameters.items() if name != "self"}


def log_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of ``self.log``, by name. The dry run has checked them: ``bind`` takes ten times as
    long."""
    return {**_DEFAULTS, **dict(zip(_DEFAULTS, args, strict=False)), **kwargs}


class LogRecorder:
    """Stands in for ``LightningModule.log`` while microbatches run.

    ::

        recorder = LogRecorder()
        with logging_through(module, recorder.log):     # log_dict calls it too
            for size, microbatch in ...:
                recorder.begin(size)
                module.training_step(microbatch, batch_idx)
        recorder.replay(module.log)

    ``log_joins.py`` makes one number of many. Objects of torchmetrics keep their own state and are passed on once:
    their value over the epoch is that of all samples, and their value of this step is the weighted mean of the
    microbatches'. A name that a step logs twice is logged twice.

    Args:
        joins: has seen earlier batches.
    """

    def __init__(self, joins: LogJoins | None = None) -> None:
        self._joins = joins or LogJoins()
        self._weight = 1
        self._times = Counter[str]()  # that the running microbatch has logged a name
        # The n-th calls with one name, one for each microbatch.
        self._calls: dict[tuple[str, int], list[_Call]] = {}

    def begin(self, weight: int) -> None:
        """A microbatch of this size begins its step."""
        self._weight = weight
        self._times.clear()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record one value of the current microbatch. It takes the parameters of ``LightningModule.log``."""
        options = log_arguments(*args, **kwargs)
        name, value, given = (options.pop(each) for each in ("name", "value", "batch_size"))
        # A copy, as Lightning makes: the step may change the tensor afterwards. Detached, or graphs would pile up.
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self._times[name] += 1
        calls = self._calls.setdefault((name, self._times[name]), [])
        calls.append(_Call(kept, step_value(value), self._weight, given, options))

    def replay(
        self,
        log: Callable[..., None],
        loss: BatchLoss | None = None,
        rules: Mapping[str, Rule | None] | None = None,
        *,
        as_loss: bool = False,
        whole: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        known: Container[str] = (),
    ) -> None:
        """Log each name as often as a microbatch did, by the real ``LightningModule.log``, in the order of the first
        calls, and forget everything.

        Args:
            loss: the batch's loss. Values that equal the losses of microbatches are weighted as they are.
            rules: by name, the ways in which values follow from those of microbatches, as far as they are known.
            as_loss: weigh other values as the losses too, since the microbatches' sizes aren't known.
            whole: returns the arguments that ``self.log`` would get for the whole batch, by name.
            known: the names whose values depend on no layer, so ``whole()`` has them.
        """
        recorded, self._calls = self._calls, {}
        rules, wholes = rules or {}, cache(whole)

        def of_whole(name: str, argument: str) -> Any:
            return wholes().get(name, {}).get(argument)

        for (name, _), calls in recorded.items():
            values = [call.value for call in calls]
            sizes = [call.weight for call in calls]
            given = [call.given for call in calls if call.given is not None]
            weights: Sequence[Number] = sizes
            size = sum(sizes)
            if as_loss and loss is not None and len(loss.weights) == len(values):
                weights = loss.weights
            if len(given) == len(values):
                weights, size = self._joins.weigh(name, values, sizes, given, partial(of_whole, name, "batch_size"))
            rule = rules.get(name)
            its = partial(of_whole, name, "value") if name in known and (name, 2) not in recorded else None
            joined = partial(self._joined, name, calls)
            is_loss = loss is not None and (rule is Rule.COUNTS or (name not in rules and loss.equal(values)))
            if loss is None or is_loss is False:
                value = joined(weights, rule, its)
            else:
                of_loss = loss.weights if len(loss.weights) == len(values) else weights
                value = joined(of_loss, Rule.SUM if loss.is_sum else Rule.COUNTS, its)
                if isinstance(is_loss, Tensor):
                    value = torch.where(is_loss, value, joined(weights, rule, its))
            log(name, value, batch_size=size, **calls[0].options)

    def _joined(
        self,
        name: str,
        calls: Sequence[_Call],
        weights: Sequence[Number],
        rule: Rule | None,
        whole: Callable[[], Any] | None,
    ) -> Any:
        values = [call.value for call in calls]
        if not all(isinstance(value, Tensor | Real) for value in values):
            step_values = [call.step_value for call in calls]
            if all(isinstance(value, Tensor) and value.numel() == 1 for value in step_values):
                # The metric's forward kept the value of the last microbatch.
                set_step_value(values[-1], weighted_mean(step_values, weights))
            return values[-1]
        if not all(isinstance(value, Real) or value.numel() == 1 for value in values):
            return values[-1]  # which Lightning refuses, in its own words
        return self._joins.join(name, values, weights, calls[0].options["reduce_fx"], rule, whole)


def discard(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in the place of ``self.log`` where it doesn't count, or of a hook that is None."""


@contextmanager
def logging_through(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Inside, ``self.log`` is ``log``. It is set as an instance attribute, since it can't be passed as an argument."""
    put_back = replaced(module, "log", log)
    try:
        yield
    finally:
        put_back()


@contextmanager
def loggers_through(trainer: pl.Trainer, note: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside, stand-ins take the loggers' places. They write nothing, or, with ``note``, call it and write."""
    loggers = trainer.loggers
    trainer.loggers = [_StandIn(logger, note) for logger in loggers]  # type: ignore[misc]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _StandIn:
    """Passes for a logger, also for ``isinstance``. What a logger does, it does by a method or by its ``experiment``;
    its other attributes can be read."""

    def __init__(self, logger: Any, note: Callable[[], None] | None) -> None:
        self._logger, self._note = logger, note

    @property  # type: ignore[misc]  # it can be set on other objects
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" or callable(getattr(self._logger, name)):
            if self._note is None:
                return getattr(DummyLogger(), name)
            self._note()
        return getattr(self._logger, name)


@contextmanager
def trial(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[dict[str, Any]]]:
    """Inside, a step doesn't count: it logs nothing, it writes to no logger, it meets no other rank, and it doesn't end
    the training. The step will do all this when it really runs. Gives a list, to which the arguments of each call of
    ``self.log`` are appended, by name."""
    stop = trainer.should_stop
    collectives: Collectives = trainer.strategy.collectives  # type: ignore[attr-defined]  # every strategy with trials has them
    logged: list[dict[str, Any]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        _LOG.bind(module, *args, **kwargs)
        logged.append(log_arguments(*args, **kwargs))

    try:
        with collectives.inside_trial(), logging_through(module, note), loggers_through(trainer):
            yield logged
    finally:
        trainer.should_stop = stop
