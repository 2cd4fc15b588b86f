"""Records when a run was saved: which part of a batch or an epoch was done, and what comes first when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_parallel.lightning_private import callbacks_of, ends_update


class SavedMoment(StrEnum):
    """When a run was saved: which part of a batch or an epoch was done, and what comes first when it is resumed."""

    INSIDE = "inside a batch"  # trains it
    TRAINED = "at the end of a batch"  # validates, if that is due
    VALIDATED = "at the end of a validation"
    BETWEEN = "between two batches"  # trains the next one
    EPOCH = "at the end of an epoch"  # its plateau schedulers
    OVER = "between two epochs"  # such as after a run, which may go on with a raised limit

    @property
    def is_in_epoch(self) -> bool:
        return self not in (SavedMoment.EPOCH, SavedMoment.OVER)

    @classmethod
    def of(cls, trainer: pl.Trainer, has_validated: bool) -> SavedMoment:
        """The moment at which a run is now. ``has_validated``: its last validation has ended."""
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.validating and trainer.state.fn == TrainerFn.FITTING:
            return cls.VALIDATED if has_validated else cls.TRAINED
        if epoch.processed == epoch.ready:
            return cls.OVER if epoch.completed == epoch.ready else cls.EPOCH
        if batch.processed < batch.ready:
            return cls.INSIDE
        return cls.BETWEEN if batch.completed == batch.ready else cls.TRAINED


def is_in_step(trainer: pl.Trainer) -> bool:
    """Is a batch under way that will be trained once more, and may have logged already?"""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batch.processed < batch.started)


def is_to_stop(trainer: pl.Trainer) -> bool:
    """Is the run to end for another reason than ``max_time``? A resumed run may have more time."""
    left = [timer.time_remaining() for timer in callbacks_of(trainer) if isinstance(timer, Timer)]
    return trainer.should_stop and not any(seconds is not None and seconds <= 0 for seconds in left)


def say_that_it_stops() -> None:
    """Report that the resumed run was to stop when it was saved."""
    rank_zero_info(
        "The run was saved when something, such as EarlyStopping, had set trainer.should_stop: it ends as it would "
        "have. To train on, resume it from an earlier checkpoint."
    )


def warn_of_gradients(trainer: pl.Trainer, moment: SavedMoment) -> None:
    """Warn that accumulated gradients aren't saved."""
    begun = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches  # batches of an update, before the last one
    lacks = begun > 0 if moment is SavedMoment.INSIDE else not ends_update(trainer)
    if lacks and moment.is_in_epoch:
        rank_zero_warn(
            "Saved in the middle of an update. Its gradients are in no checkpoint: a run resumed from this one differs "
            "in it. Save and validate after numbers of batches that are multiples of "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )


def warn_of_repetition(trainer: pl.Trainer, moment: SavedMoment) -> None:
    """Warn that work that has begun, and is done once more, has drawn random numbers, and may have logged, already."""
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


def count_as_completed(progress: Mapping[str, Any]) -> None:
    """Count processed batches as completed and as started. A batch for which ``on_train_batch_start`` returned -1 is
    processed without being started: Lightning would take the batch after it for one that was saved inside, and count it
    once more for loggers."""
    for counters in (progress["total"], progress["current"]):
        counters["started"] = counters["completed"] = counters["processed"]


def count_as_not_begun(progress: dict[str, Any]) -> None:
    """Count the batches that have not been completed as not begun: they are done once more."""
    for counters in (progress["total"], progress["current"]):
        counters["ready"] = counters["started"] = counters["processed"] = counters["completed"]
    progress["is_last_batch"] = False
