"""Refuses what ``training_step`` does to the whole run, since it is called for each microbatch of a batch, and only the
last stage runs its end::

    group["lr"] *= 0.5                                 refused, as is a scheduler's step
    self.log("loss", loss)
    self.trainer.callback_metrics["loss"]              refused: it is logged when all microbatches have run
    if loss < 0.1: self.trainer.should_stop = True     warned of, where microbatches disagree
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel.lightning_private.metrics import metric_places, replace_metric_places
from lightning_parallel.parts.late_values import LateMetrics
from lightning_parallel.parts.logs import log_arguments, logging_through
from lightning_parallel.parts.run import Run
from lightning_parallel.torch_private import version_of


class StepEffects:
    """Watches the steps of a run on the last stage, which alone runs all of them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: RuntimeError | None = None
        self._stops: list[bool] = []  # of the batch's microbatches: did the step set `should_stop`?

    @contextmanager
    def around(self, *, counts: bool) -> Iterator[None]:
        """A context for a run of the step, or for a look at it, which doesn't count.

        Raises:
            RuntimeError: the step sets an option of an optimizer, or reads a metric that it has logged.
        """
        trainer, module, logged = self._run.trainer, self._run.module, set[str]()
        log, places, options, stop = module.log, metric_places(trainer), _options(trainer), trainer.should_stop

        def note(*args: Any, **kwargs: Any) -> None:
            call = log_arguments(*args, **kwargs)
            if call["on_step"] is not False:  # else it is a metric at the epoch's end only, as in one process
                logged.update((call["name"], f"{call['name']}_step"))
            log(*args, **kwargs)

        def refuse_read(*keys: Any) -> None:
            if logged.intersection(keys) if keys else logged:
                name = keys[0] if keys else min(logged)
                self._refuse(
                    f"reads the metric {name!r} of the Trainer, which it has just logged", "on_train_batch_end"
                )

        def guarded(metrics: dict[str, Any]) -> LateMetrics:
            guard = LateMetrics(metrics)
            guard.update_first = refuse_read
            return guard

        trainer.should_stop = False
        replace_metric_places(trainer, guarded)
        try:
            with logging_through(module, note):
                yield
            if counts:
                self._stops.append(trainer.should_stop)
        finally:
            trainer.should_stop |= stop
            before = iter(places)
            replace_metric_places(trainer, lambda _: next(before))
            for place, value in _options(trainer).items():
                if options.get(place) != value:
                    kind, _, name = place
                    self._refuse(f"changes {name!r} of {kind}", "on_train_batch_start or on_train_batch_end")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        self._found = RuntimeError(
            f"training_step {what}. It is called for each microbatch of a batch, and only the last stage runs its end. "
            f"Do this in {instead}."
        )
        raise self._found

    def check(self) -> None:
        """Raise what a look has found, where errors of the step don't count."""
        if self._found is not None:
            raise self._found

    def end_batch(self) -> None:
        """Warn if some microbatches of a batch have asked for the end, and others haven't."""
        stops, self._stops = self._stops, []
        if len({*stops}) > 1:
            rank_zero_warn(
                "training_step has set trainer.should_stop in some microbatches of a batch, and not in others, so the "
                "run ends. The loss of the whole batch might decide otherwise: look at it in on_train_batch_end."
            )


def _options(trainer: pl.Trainer) -> dict[tuple[str, int, str], Any]:
    """What schedulers and optimizers have, by their kind, a number and a name."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    found = {(type(s).__name__, i, "last_epoch"): getattr(s, "last_epoch", None) for i, s in enumerate(schedulers)}
    groups = [(type(each).__name__, group) for each in trainer.optimizers for group in each.param_groups]
    for i, (kind, group) in enumerate(groups):
        found |= {(kind, i, name): _content(value) for name, value in group.items()}
    return found


def _content(value: Any) -> Any:
    """What tells whether a value has changed. A tensor isn't read, since a GPU would be waited for."""
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return value if plain else (id(value), version_of(value) if isinstance(value, Tensor) else 0)
