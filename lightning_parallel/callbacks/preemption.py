"""Saves and ends a run on all ranks when a scheduler is about to stop it, so that nothing is lost.

The scheduler sends SIGTERM or SIGUSR1 to one rank or to all, at any moment, and kills what still runs some seconds
later. So the handler only notes the signal. Between two batches, every rank tells the others whether it has got one.
In the same message it says whether it has set ``trainer.should_stop``, for which the others stop, too::

    rank 0    batch 6   no    batch 7      SIGTERM: save, leave
    rank 1    batch 6   no    batch 7 !    SIGTERM: save, leave
                                      ^ SIGTERM

In the asynchronous pipeline the first stage is some batches ahead of the last one, and must not wait for it. There the
ranks vote (:mod:`~lightning_parallel.ranks.vote`), and all leave some batches later.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_parallel.private.lightning.batches import between_batches, ends_update
from lightning_parallel.private.lightning.checkpoints import save_last
from lightning_parallel.private.lightning.signals import requeue_by_slurm, say_terminated, take_signals
from lightning_parallel.ranks.meeting import Meeting
from lightning_parallel.ranks.vote import Vote

# By rank: SIGUSR1 may also ask to be started again. Windows has the first only.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Preemption(Callback):
    """Ends a run whose process gets SIGTERM or SIGUSR1, after the batch (of an update: after the update) that runs.

    The run is saved as ModelCheckpoint saves its last checkpoint, ``last.ckpt``, whatever its triggers are. Then
    Lightning's ``SIGTERMException``, a ``SystemExit``, ends the script. Resumed from this checkpoint, the run goes on
    as if it hadn't been stopped. Before training, and in ``validate``, ``test`` and ``predict``, there is nothing to
    save, and the exception is raised at once.

    The strategies of this package bring this callback along, and :class:`ExactResume`. With Lightning's own, pass
    them to the Trainer::

        Trainer(strategy="ddp", callbacks=[Preemption(), ExactResume()])

    A validation runs to its end first, since a module may use other weights meanwhile.
    """

    def __init__(self) -> None:
        self._signal = 0  # 1 and more: which one of _SIGNALS
        self._agreed = 0  # the highest of all ranks'
        self._meeting: Meeting | None = None
        self._vote: Vote | None = None  # on should_stop and each signal, where ranks may be ahead
        self._put_back: Callable[[], None] | None = None
        self._begun_at = 0  # batch

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        take_signals(trainer, _SIGNALS, partial(self._received, trainer))

    def _received(self, trainer: pl.Trainer, number: int, frame: Any) -> None:
        # A run that has failed ends with its error: a signal must not take its place.
        if self._put_back is None and not trainer.interrupted:
            raise SIGTERMException
        self._signal = max(self._signal, 1 + _SIGNALS.index(number))

    # -- a run of Trainer.fit ------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._put_back is not None:  # of a learning-rate finder, within a run
            return
        self._begun_at = trainer.fit_loop.total_batch_idx
        ahead = getattr(trainer.strategy, "batches_ahead", 0)
        self._meeting = Meeting(trainer.world_size, getattr(trainer.strategy, "timeout", None))
        self._vote = Vote(1 + len(_SIGNALS), ahead) if ahead else None
        self._agreed = 0
        hooks = self._leave_if_asked, self._agree_after_batch, self._agree
        self._put_back = between_batches(trainer, *(partial(hook, trainer) for hook in hooks))

    def _agree_after_batch(self, trainer: pl.Trainer) -> None:
        if self._vote is None:
            self._agree(trainer)
            return
        if self._vote.held[0] and not trainer.should_stop:
            raise RuntimeError(
                "trainer.should_stop was set, and holds on all ranks by now. Then it was taken back between two "
                "batches, where the pipeline's stages don't wait for each other. Take it back where they do (in "
                "on_validation_end or on_train_epoch_end), or set it only when min_epochs and min_steps are reached."
            )
        signals = range(1, 1 + len(_SIGNALS))
        wishes = trainer.should_stop, *(self._signal == each for each in signals)
        trainer.should_stop, *agreed = self._vote.after_batch(*wishes)
        self._agreed = max([self._agreed, *(each for each, holds in zip(signals, agreed, strict=True) if holds)])

    def _agree(self, trainer: pl.Trainer) -> None:
        if self._meeting is not None:
            wished = trainer.should_stop or (self._vote is not None and self._vote.pending[0])
            self._agreed, stop = self._meeting.highest(self._signal, int(wished))
            trainer.should_stop = bool(stop)
            if self._vote is not None:
                self._vote.met()

    def _leave_if_asked(self, trainer: pl.Trainer) -> None:
        assert self._meeting is not None
        if self._agreed and ends_update(trainer):
            self._meeting.highest(self._agreed)  # a rank that is ahead stays until its messages have been read
            self._save_and_leave(trainer, self._agreed)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle a signal that came in the last batches or after them. A run resumed from there has no batch left."""
        if self._meeting is None:
            return
        [last] = self._meeting.highest(self._signal)
        if last:
            self._save_and_leave(trainer, last)

    def _save_and_leave(self, trainer: pl.Trainer, which: int) -> None:
        self._save(trainer, _SIGNALS[which - 1])
        say_terminated(trainer)
        raise SIGTERMException

    def _save(self, trainer: pl.Trainer, number: signal.Signals) -> None:
        name, step = number.name, trainer.global_step
        if trainer.fit_loop.total_batch_idx == self._begun_at:
            rank_zero_info(f"{name} before the first batch: there is nothing to save.")
            return
        if requeue_by_slurm(trainer, number):
            return
        for checkpoint in trainer.checkpoint_callbacks:
            if isinstance(checkpoint, ModelCheckpoint) and not checkpoint.save_weights_only:
                rank_zero_info(f"{name} after step {step}: saved to {save_last(checkpoint, trainer)}.")
                return
        rank_zero_warn(f"{name} after step {step}: not saved, since no ModelCheckpoint saves whole checkpoints.")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._vote is not None:
            self._vote.leave()
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._put_back is not None:
            self._put_back()
        self._put_back = self._meeting = self._vote = None
        self._signal = 0
