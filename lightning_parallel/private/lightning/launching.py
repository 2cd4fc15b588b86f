"""How a Trainer starts its processes, and what it tells a module and its optimizers of its device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.optim import Optimizer

S = TypeVar("S", bound=type[Strategy])

_OURS = "lightning_parallel"
_LIBRARIES = (_OURS, "contextlib", "functools", "lightning", "torch")


def launched_by_make_launcher(strategy: S) -> S:
    """Class decorator: ``make_launcher()`` is called where Lightning calls the private hook ``_configure_launcher``.

    It is the last call while a Trainer is made, so it is also the place to refuse what is known by then. This includes
    ``sync_batchnorm``: Lightning hands its plugin to strategies that have the private attribute ``_layer_sync``
    (:func:`layer_sync_of`).
    """

    def _configure_launcher(self: Any) -> None:
        self._launcher = self.make_launcher()

    strategy._configure_launcher = _configure_launcher  # type: ignore[method-assign]
    strategy._layer_sync = None  # type: ignore[attr-defined]
    return strategy


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts a script once more for each further process, as Lightning's own strategies do. It keeps what the Trainer's
    call was given as ``weights_only``. A refusal's message says everything, so its traceback has the user's own lines
    alone."""

    weights_only: bool | None = None

    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "trainer"}
        self.weights_only = inspect.signature(function).bind(*args, **given).arguments.get("weights_only")
        try:
            return super().launch(function, *args, **kwargs)
        except ValueError as error:
            frames = _frames_of_refusal(error.__traceback__)
            if frames is None:
                raise
            raise error.with_traceback(frames) from error.__cause__


def _frames_of_refusal(raised: TracebackType | None) -> TracebackType | None:
    """The user's own frames, and the one that has raised the error; None if that is no frame of this package."""
    frames = []
    while raised is not None:
        frames.append(raised)
        raised = raised.tb_next
    packages = [str(each.tb_frame.f_globals.get("__name__")).partition(".")[0] for each in frames]
    if packages[-1] != _OURS:
        return None
    kept = None
    for each, package in reversed([*zip(frames, packages, strict=True)]):
        if each is frames[-1] or package not in _LIBRARIES:
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def asked_weights_only(strategy: Strategy) -> bool | None:
    """What ``Trainer.fit(weights_only=...)``, or another call of the Trainer's, was given. Lightning doesn't hand it to
    a strategy that loads a checkpoint after its set-up; a :class:`ScriptLauncher` sees the call's arguments."""
    return getattr(strategy.launcher, "weights_only", None)


def init_process_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, **options: Any) -> None:
    """Join the default process group that a cluster environment describes. Lightning's function also sets the
    environment's rendezvous variables and logs the start."""
    _init_dist_connection(environment, backend, timeout=timeout, **options)


def layer_sync_of(strategy: Strategy) -> Any | None:
    """The plugin that ``Trainer(sync_batchnorm=True)`` gives to a strategy, or None."""
    return getattr(strategy, "_layer_sync", None)


# -- the strategy's tools ----------------------------------------------------------------------------------------


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to a device."""
    _optimizers_to_device(list(optimizers), device)


def say_device(module: pl.LightningModule, device: torch.device) -> None:
    """Set what ``module.device`` returns. Publicly only ``module.to(device)`` does, which moves the module."""
    _update_properties(module, device=device)


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The list of a Trainer's callbacks, which may be changed. A connector sets it, so it is not typed."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]
