"""Signals that reach a process while it runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

Handler = Callable[[int, Any], None]


def take_signals(trainer: pl.Trainer, numbers: Sequence[signal.Signals], received: Handler) -> None:
    """In the next run of a Trainer, have ``received`` called for these signals in the place of Lightning's handlers,
    which enter a collective, or save, wherever the process happens to be. The end of the run puts back what was there
    before.

    A user's own handler for SIGTERM runs after ``received``; another signal that has one is left to it.
    """
    connector = trainer._signal_connector

    def register() -> None:
        del connector.register_signal_handlers
        own = {number: signal.getsignal(number) for number in numbers}
        connector.register_signal_handlers()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in own.items():
            if not callable(handler):
                signal.signal(number, received)
            elif number is signal.SIGTERM:
                signal.signal(number, partial(both, handler))

    def both(own: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        received(number, frame)
        own(number, frame)

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def say_terminated(trainer: pl.Trainer) -> None:
    """Make ``trainer.received_sigterm`` true."""
    trainer._signal_connector.received_sigterm = True


def requeue_by_slurm(trainer: pl.Trainer, number: int) -> bool:
    """If Lightning is to requeue the SLURM job at this signal, have it save and ask SLURM; returns whether it did. All
    ranks call it."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return False
    if number != (environment.requeue_signal or signal.SIGUSR1):
        return False
    trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
    return True
