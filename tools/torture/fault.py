"""The fault of a case: at a moment of a run, something happens to one of its processes.

:class:`Fault` is a callback of the run, in each of its workers. Callbacks see where batches and saves begin, and arm
the moment there, in the environment of their process. What is inside (a layer, a write to disk) then reaches it::

    on_train_batch_start    arms "forward"        a layer of the model                  reaches it
    save_checkpoint         arms "writing"        torch.save, which is replaced here    reaches it

The product has no hook for this: what it calls is replaced in the process of the case.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

SAVES_EVERY = 2  # steps
FAULTY_STEP = 4  # the step whose save is disturbed, and after which a batch is
LAUNCHER = -1  # in the place of a rank

_ARMED, _KIND, _TARGET, _FOLDER = (f"TORTURE_{name}" for name in ("ARMED", "KIND", "TARGET", "FOLDER"))
HAPPENED, _REACHED, _DONE = "fault.happened", "fault.reached", "fault.done"  # files of the run's folder


class Moment(StrEnum):
    """What a run does when something happens to it."""

    START = "start-up"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    VALIDATION = "validation"
    WRITING = "writing"
    RENAME = "before the rename"
    PRUNING = "pruning"


class Kind(StrEnum):
    """What happens."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    ERROR = "exception"


class InjectedError(Exception):
    """A rank's own error."""


def arm(moment: Moment, kind: Kind, target: int) -> None:
    """Where this process reaches the moment next, it happens to the target. Once."""
    os.environ |= {_ARMED: moment, _KIND: kind, _TARGET: str(target)}


def disarm() -> None:
    """Nothing happens any more."""
    os.environ.pop(_ARMED, None)


def reach(moment: Moment) -> None:
    """The process is at a moment: if that is armed, let it happen."""
    if os.environ.get(_ARMED) == moment:
        disarm()
        _happen(Kind(os.environ[_KIND]), int(os.environ[_TARGET]), Path(os.environ[_FOLDER]))


def _happen(kind: Kind, target: int, folder: Path) -> None:
    own = int(os.environ["RANK"])
    if target in (own, LAUNCHER):
        _strike(kind, target, folder)
        return
    # Only this rank is at this moment. It waits here while it happens to the other one.
    (folder / _REACHED).touch()
    _wait_for(folder / _DONE, seconds=10)
    time.sleep(0.3)


def _strike(kind: Kind, target: int, folder: Path) -> None:
    (folder / HAPPENED).touch()
    if kind is Kind.ERROR:
        raise InjectedError(f"of rank {target}")
    os.kill(int(os.environ["RECIPES_LAUNCHER"]) if target == LAUNCHER else os.getpid(), signal.Signals[kind])


def _wait_for(file: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Fault(Callback):
    """Lets something happen to one process of the run.

    Args:
        moment: when.
        kind: what.
        target: the rank that it happens to, or :data:`LAUNCHER`.
        by: the rank that reaches the moment. The others wait for it then, the target among them.
        folder: of the run.
    """

    def __init__(self, moment: str, kind: str, target: int, by: int, folder: str) -> None:
        self._moment, self._kind, self._target = Moment(moment), Kind(kind), target
        self._folder = Path(folder)
        self._mine = int(os.environ["RANK"]) == by
        os.environ[_FOLDER] = folder
        if int(os.environ["RANK"]) == target != by:
            threading.Thread(target=self._stand_by, daemon=True).start()
        if self._mine and self._moment is Moment.START:
            self._arm()
            reach(Moment.START)

    def _arm(self) -> None:
        arm(self._moment, self._kind, self._target)

    def _stand_by(self) -> None:
        """The target, while another rank runs to the moment."""
        if not _wait_for(self._folder / _REACHED, seconds=600):
            return
        (self._folder / _DONE).touch()
        if self._kind is not Kind.ERROR:
            _strike(self._kind, self._target, self._folder)
            return
        (self._folder / HAPPENED).touch()
        os.kill(os.getpid(), signal.SIGUSR2)  # the main thread raises where it gets to Python again

    # -- where moments begin -------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        signal.signal(signal.SIGUSR2, self._raise)
        if self._mine and self._moment in (Moment.WRITING, Moment.RENAME):
            strategy: Any = trainer.strategy
            strategy.save_checkpoint = self._armed_in(strategy.save_checkpoint, trainer)
        elif self._mine and self._moment is Moment.PRUNING:
            strategy = trainer.strategy
            strategy.remove_checkpoint = self._armed_in(strategy.remove_checkpoint, trainer)
        _replace_writers()

    def _raise(self, number: int, frame: Any) -> None:
        raise InjectedError(f"of rank {self._target}")

    def _armed_in(self, action: Callable[..., Any], trainer: L.Trainer) -> Callable[..., Any]:
        def armed(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_step == FAULTY_STEP:
                self._arm()
            try:
                return action(*args, **kwargs)
            finally:
                disarm()

        return armed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: reach(Moment.STEP))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._mine and batch_idx == FAULTY_STEP and self._moment in (Moment.FORWARD, Moment.BACKWARD, Moment.STEP):
            self._arm()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._mine and self._moment is Moment.VALIDATION and trainer.global_step == FAULTY_STEP:
            self._arm()
            self._mine = False
        reach(Moment.VALIDATION)


def _replace_writers() -> None:
    """What saves, renames and deletes reaches its moment, in this process. Nothing happens unless it is armed."""
    torch.save = _then(torch.save, Moment.WRITING)
    os.unlink = _then(os.unlink, Moment.PRUNING)
    os.remove = _then(os.remove, Moment.PRUNING)
    os.rename, os.replace = _before_its_place(os.rename), _before_its_place(os.replace)


def _before_its_place(rename: Callable[..., None]) -> Callable[..., None]:
    def replaced(source: Any, target: Any, **kwargs: Any) -> None:
        if os.fspath(target).endswith(".ckpt"):
            reach(Moment.RENAME)
        rename(source, target, **kwargs)

    return replaced


def _then(action: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = action(*args, **kwargs)
        reach(moment)
        return result

    return replaced
