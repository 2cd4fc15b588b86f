"""Refuses changes that ``training_step`` makes to the whole run. It is called for each microbatch of a batch, and only
the last stage runs its end::

    group["lr"] *= 0.5                                 refused, as is a scheduler's step
    self.log("loss", loss)
    self.trainer.callback_metrics["loss"]              refused: it is logged when all microbatches have run
    if loss < 0.1: self.trainer.should_stop = True     warned of, where microbatches disagree
    self.logger.experiment.add_image(...)              warned of
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import lightning.pytorch as pl
from torch import Tensor

from lightning_parallel.private.lightning.metrics import metric_places, replace_metric_places
from lightning_parallel.private.torch.tensors import version_of
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.late_values import LateMetrics
from lightning_parallel.results.logs import log_arguments, loggers_through, logging_through
from lightning_parallel.values import same_value


class StepEffects:
    """Watches steps on the last stage, the only one that runs them to their end. The Trainer's metrics and ``self.log``
    are replaced once a batch, since replacing them takes longer than a short step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: RuntimeError | None = None
        self._is_watching = False
        self._logged: set[str] = set()  # the names that the step has logged
        self._has_written = self._has_warned = False  # to loggers, and of it
        self._stops: list[bool] = []  # of the batch's microbatches: did the step set `should_stop`?

    @contextmanager
    def watching(self, log: Callable[..., None]) -> Iterator[None]:
        """A context for the steps of a batch, which log through ``log``."""
        trainer = self._run.trainer
        places = metric_places(trainer)

        def note(*args: Any, **kwargs: Any) -> None:
            call = log_arguments(*args, **kwargs)
            if call["on_step"] is not False:  # else it is a metric at the epoch's end only, as in one process
                self._logged.update((call["name"], f"{call['name']}_step"))
            log(*args, **kwargs)

        replace_metric_places(trainer, lambda metrics: LateMetrics(metrics, self._refuse_read))
        self._is_watching = True
        try:
            with logging_through(self._run.module, note), loggers_through(trainer, self._note_write):
                yield
        finally:
            self._is_watching = False
            before = iter(places)
            replace_metric_places(trainer, lambda _: next(before))

    def _note_write(self) -> None:
        self._has_written = True

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step of the batch.

        Raises:
            RuntimeError: it has set an option of an optimizer, stepped a scheduler, or read a metric that it has
                logged.
        """
        trainer = self._run.trainer
        stop, trainer.should_stop = trainer.should_stop, False
        try:
            result = self._checked(step)
            self._stops.append(trainer.should_stop)
        finally:
            trainer.should_stop |= stop
        return result

    def try_out(self, step: Callable[[], Any]) -> Any:
        """Run a step without effect (a dry run, a trial), outside of a batch or within one."""
        with nullcontext() if self._is_watching else self.watching(self._run.module.log):
            return self._checked(step)

    def _checked(self, step: Callable[[], Any]) -> Any:
        self._logged.clear()
        before = _options(self._run.trainer)
        try:
            return step()
        finally:  # a dry run ends with an error where the step needs a value
            for place, value in _options(self._run.trainer).items():
                if not same_value(value, before.get(place)):
                    kind, _, name = place
                    self._refuse(f"changes {name!r} of {kind}", "on_train_batch_start or on_train_batch_end")

    def _refuse_read(self, *keys: Any) -> None:
        if self._logged.intersection(keys) if keys else self._logged:
            name = keys[0] if keys else min(self._logged)
            self._refuse(f"reads the metric {name!r} of the Trainer, which it has just logged", "on_train_batch_end")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        self._found = RuntimeError(
            f"training_step {what}. It is called for each microbatch of a batch, and only the last stage runs its end. "
            f"Do this in {instead}."
        )
        raise self._found

    def check(self) -> None:
        """Raise what a dry run has found. During the dry run itself, errors of the step are suppressed."""
        if self._found is not None:
            raise self._found

    def end_batch(self) -> None:
        """Warn if some microbatches of a batch have set ``should_stop``, and others haven't, or if they have written
        to a logger."""
        stops, self._stops = self._stops, []
        if self._has_written and not self._has_warned and len(stops) > 1:
            self._has_warned = True
            self._run.warn(
                "training_step writes to self.logger, and is called for each microbatch. So each of them is written, "
                "under the same step. Use self.log, or write in on_train_batch_end."
            )
        if len({*stops}) > 1:
            self._run.warn(
                "training_step has set trainer.should_stop in some microbatches of a batch, and not in others, so the "
                "run ends. The loss of the whole batch might decide otherwise: decide in on_train_batch_end."
            )


def _options(trainer: pl.Trainer) -> dict[tuple[str, int, str], Any]:
    """The step count of each scheduler, and the options of each parameter group, by class, number and name. A tensor
    isn't read, since that would wait for a GPU: its version shows whether it has changed."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    found = {
        (type(each).__name__, i, "last_epoch"): getattr(each, "last_epoch", None) for i, each in enumerate(schedulers)
    }
    groups = [(type(each).__name__, group) for each in trainer.optimizers for group in each.param_groups]
    for i, (kind, group) in enumerate(groups):
        for name, value in group.items():
            found[kind, i, name] = (value, version_of(value)) if isinstance(value, Tensor) else value
    return found
