"""``self.log`` inside microbatches: logs for each name the one value that the undivided batch would have logged."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_parallel.lightning_private import set_step_value, step_value
from lightning_parallel.parts.collectives import Collectives
from lightning_parallel.parts.log_joins import LogJoins
from lightning_parallel.pipeline.loss_graph import Number
from lightning_parallel.pipeline.normaliser import BatchLoss, Rule, mean


@dataclass(slots=True)
class _Entry:
    """The calls of ``self.log`` with one name. Lists have an item for each microbatch.

    Attributes:
        options: the arguments of the first call.
        values: as they were logged.
        step_values: what the last forward of a metric object returned.
        given: the user's ``batch_size=``.
    """

    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    step_values: list[Any] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    given: list[int | None] = field(default_factory=list)


class LogRecorder:
    """Stands in for ``LightningModule.log`` while microbatches run.

    ::

        recorder = LogRecorder()
        with logging_through(module, recorder.log):     # log_dict calls it too
            for size, microbatch in ...:
                recorder.weight = size
                module.training_step(microbatch, batch_idx)
        recorder.replay(module.log)

    Tensors and numbers become their mean, weighted by microbatch size, or by ``batch_size=`` where the user gives it (a
    loss per token is then weighted by tokens). With ``reduce_fx`` "sum", "max" or "min" they become their sum, maximum
    or minimum. Objects of torchmetrics keep their own state and are passed on once: their value over the epoch is that
    of all samples, and their value of this step is the weighted mean of the microbatches'.

    Attributes:
        weight: the size of the microbatch that is running.
    """

    def __init__(self, joins: LogJoins | None = None) -> None:
        self._joins = LogJoins() if joins is None else joins
        self._whole: Callable[[], Mapping[str, Any]] | None = None
        self._known: Container[str] = ()
        self.weight = 1
        self._entries: dict[str, _Entry] = {}

    def tell(self, joins: LogJoins, whole: Callable[[], Mapping[str, Any]], known: Container[str]) -> None:
        """Pass on what is known of the batch: the joins of earlier batches, and ``whole``, which gives what the whole
        batch logs, for the names in ``known``."""
        self._joins, self._whole, self._known = joins, whole, known

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
        """Record one value of the current microbatch. It takes the parameters of ``LightningModule.log``."""
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
        # A copy, as Lightning makes: the step may change the tensor afterwards. Detached, or graphs would pile up.
        entry.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        entry.step_values.append(step_value(value))
        entry.weights.append(self.weight)
        entry.given.append(batch_size)

    def extend(self, other: LogRecorder) -> None:
        """Append what another recorder has recorded, as if it had been logged here."""
        for name, entry in other._entries.items():
            own = self._entries.setdefault(name, _Entry(entry.options))
            own.values += entry.values
            own.step_values += entry.step_values
            own.weights += entry.weights
            own.given += entry.given

    def replay(
        self, log: Callable[..., None], loss: BatchLoss | None = None, rules: Mapping[str, Rule | None] | None = None
    ) -> None:
        """Log each name once, by the real ``LightningModule.log``, in the order of the first calls, and forget
        everything.

        Args:
            loss: the batch's loss. Values that equal the losses of microbatches are weighted as they are.
            rules: by name, the ways in which values follow from those of microbatches, as far as they are known.
        """
        entries, self._entries = self._entries, {}
        for name, entry in entries.items():
            weights: Sequence[Number] = entry.weights
            size = sum(entry.weights)
            if None not in entry.given:
                given = [size for size in entry.given if size is not None]
                # One number for microbatches of different sizes is a setting, not a count of what is in each.
                if len(set(given)) > 1 or len(set(weights)) == 1:
                    weights, size = given, sum(given)
            known = rules or {}
            rule = known.get(name)
            if loss is not None and (rule is Rule.COUNTS or (name not in known and loss.are(entry.values))):
                counts = loss.weights
                weights = counts if len(counts) == len(entry.values) else weights
                rule = Rule.SUM if loss.is_sum else Rule.COUNTS
            log(name, self._joined(name, entry, weights, rule), batch_size=size, **entry.options)

    def _joined(self, name: str, entry: _Entry, weights: Sequence[Number], rule: Rule | None) -> Any:
        values = entry.values
        if not all(isinstance(value, Tensor | Real) for value in values):
            if all(isinstance(value, Tensor) and value.numel() == 1 for value in entry.step_values):
                # The metric's forward kept the value of the last microbatch.
                set_step_value(values[-1], mean(entry.step_values, weights))
            return values[-1]
        if not all(isinstance(value, Real) or value.numel() == 1 for value in values):
            return values[-1]  # which Lightning refuses, in its own words
        whole = self._whole if name in self._known else None
        return self._joins.join(name, values, weights, entry.options["reduce_fx"], rule, whole)


@contextmanager
def logging_through(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Inside, ``self.log`` is ``log``. It is set as an instance attribute, since it can't be passed as an argument."""
    before = vars(module).get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.log
        else:
            module.log = before  # type: ignore[method-assign]


@contextmanager
def trial(
    trainer: pl.Trainer, module: pl.LightningModule, log: Callable[..., None] = lambda *args, **kwargs: None
) -> Iterator[None]:
    """Inside, a step doesn't count: what it logs goes to ``log``, it meets no other rank, and it doesn't end the
    training. The step will do all this when it really runs."""
    stop = trainer.should_stop
    collectives: Collectives = trainer.strategy.collectives  # type: ignore[attr-defined]  # of all that take looks
    try:
        with collectives.inside_look(), logging_through(module, log):
            yield
    finally:
        trainer.should_stop = stop


@contextmanager
def logging_trial(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[tuple[Any, ...]]]:
    """A :func:`trial` that gives a list, and appends to it each call of ``self.log``."""
    logged: list[tuple[Any, ...]] = []

    def keep(*args: Any, **kwargs: Any) -> None:
        logged.append((args, kwargs))

    with trial(trainer, module, keep):
        yield logged


def logged_values(logged: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """The values in the list of :func:`logging_trial`, by name."""
    return dict(_name_and_value(*args, **kwargs) for args, kwargs in logged)


def _name_and_value(name: str, value: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    return name, value
