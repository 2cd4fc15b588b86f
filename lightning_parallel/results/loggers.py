"""Stand-ins for the Trainer's loggers while ``training_step`` runs. What it writes to one by itself is written for each
microbatch, and in a dry run it would be made up.

::

    self.log("loss", loss)                              one value for the batch, whatever the number of microbatches
    self.logger.log_metrics({"loss": loss.item()})      through the stand-in
    self.logger.experiment.add_image(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger


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
