"""Records when a run was saved: which part of a batch or an epoch was done, and what comes first when it is resumed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.private.lightning.batches import ends_update, validation_has_ended
from lightning_parallel.private.lightning.launching import callbacks_of


class SavedMoment(StrEnum):
    """When a run was saved: which part of a batch or an epoch was done, and what comes first when it is resumed."""

    TRAINED = "at the end of a batch"  # validates, if that is due
    VALIDATED = "at the end of a validation"
    BETWEEN = "between two batches"  # trains the next one; also inside a batch, before its update, which it repeats
    EPOCH = "at the end of an epoch"  # its plateau schedulers
    OVER = "between two epochs"  # such as after a run, which may go on with a raised limit

    @property
    def is_in_epoch(self) -> bool:
        return self not in (SavedMoment.EPOCH, SavedMoment.OVER)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> SavedMoment:
        """The moment at which a run is now."""
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.validating and trainer.state.fn == TrainerFn.FITTING:
            return cls.VALIDATED if validation_has_ended(trainer) else cls.TRAINED
        if epoch.processed == epoch.ready:
            return cls.OVER if epoch.completed == epoch.ready else cls.EPOCH
        return cls.TRAINED if batch.completed < batch.processed else cls.BETWEEN


def is_in_step(trainer: pl.Trainer) -> bool:
    """Is a batch under way that will be trained once more, and may have logged already?"""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batch.processed < batch.started)


def is_to_stop(trainer: pl.Trainer) -> bool:
    """Is the run to end for another reason than ``max_time``? A resumed run may have more time."""
    left = [timer.time_remaining() for timer in callbacks_of(trainer) if isinstance(timer, Timer)]
    return trainer.should_stop and not any(seconds is not None and seconds <= 0 for seconds in left)


def warn_of_what_is_lost(trainer: pl.Trainer, moment: SavedMoment) -> None:
    """Warn that gradients and other ranks' states aren't saved, and that work that has begun, and is done once more,
    has drawn random numbers, and may have logged, already."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    update = trainer.accumulate_grad_batches
    ended = batch.processed == batch.ready and ends_update(trainer)
    if moment.is_in_epoch and batch.processed % update and not ended:
        rank_zero_warn(
            "Saved in the middle of an update. Its gradients are in no checkpoint: a run resumed from this one differs "
            f"in it. Save and validate after numbers of batches that are multiples of accumulate_grad_batches={update}."
        )
    if is_in_step(trainer):
        rank_zero_warn(
            "Saved inside a training step. A run resumed from this checkpoint does the step once more, with other "
            "random numbers, and what it logs with on_epoch=True covers the rest of the epoch only. Checkpoints that "
            "are saved in on_train_batch_end, or between steps, have all."
        )
    elif trainer.validating and moment is SavedMoment.TRAINED:
        rank_zero_warn(
            "Saved inside a validation. A run resumed from this checkpoint validates once more, with other random "
            "numbers. Checkpoints that are saved in on_validation_end have all."
        )
    if trainer.interrupted and trainer.world_size > 1:
        rank_zero_warn(
            "Saved after an error, when other ranks may have left: the checkpoint has the random states, the place in "
            "the data and the sums over the epoch of rank 0 only. A run that is resumed from it is not the same."
        )
