"""Makes a resumed run go on with what would have come next: the rest of its batch, the samples, the random numbers.

Lightning's checkpoints lack what is on the left; this callback adds it::

    the moment         A run is saved at the end of a batch, at the end of a validation, between two batches, or at the
                       end of an epoch (:class:`.SavedMoment`). Lightning guesses from its counters, and leaves out what
                       would have followed: a validation that was due, steps of plateau schedulers.
    metrics            What was logged, which those schedulers, callbacks, and the end of the run read; the sums over
                       the epoch that ``self.log(on_epoch=True)`` has begun, for each replica.
    generators         A directory checkpoint has those of each rank. Under Lightning's own strategies rank 0 writes the
                       file, so it gathers them. They are put back after all that draws at the start of a run: before
                       the next batch is loaded, or the next epoch begins.
    states of loaders  Lightning saves those of rank 0. Here rank 0 gathers one for each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_parallel.callbacks.resumable_loader import with_what_comes_next
from lightning_parallel.checkpoint.plain import RANDOM_STATES
from lightning_parallel.checkpoint.trainer_checkpoints import RANDOM_STATE
from lightning_parallel.private.lightning.batches import (
    continue_after_epoch,
    continue_epoch,
    ends_update,
    validation_has_ended,
)
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.private.lightning.metrics import continue_sums, epoch_sums
from lightning_parallel.ranks.collectives import gather_objects_on_first
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.seeding import random_state, restore_random_state

_PROGRESS = "exact_resume"  # in any checkpoint
_OF_LOADERS = "loader_states"  # in any checkpoint: by replica
_LIGHTNINGS = "combined_loader"  # of Lightning's

_SEARCHES = (LearningRateFinder, BatchSizeFinder)  # before a run
_OF_SEARCHES = (".lr_find_", ".scale_batch_size_")  # what Lightning calls the checkpoints that they begin with


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


class ExactResume(Callback):
    """Saves the moment of the save, the metrics, the states of torch's, NumPy's and Python's generators, and of each
    replica's data loaders that have one (:class:`.ResumableDataLoader`). A run that is resumed gets those of its
    replica back; under another number of replicas, the place in the data is the first one's.

    The strategies of this package bring this callback along. With Lightning's own, pass it to the Trainer::

        Trainer(strategy="ddp", callbacks=[ExactResume()])
    """

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] = {}  # what the checkpoint holds, until the run has begun
        self._restore: Callable[[], None] = lambda: None  # the generators
        self._put_back: Callable[[], None] = lambda: None  # ends what the run hasn't come to

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        moment = SavedMoment.of(trainer)
        _warn_of_what_is_lost(trainer, moment)
        if getattr(trainer.strategy, "saves_as_lightning", True):
            checkpoint[RANDOM_STATES] = _gathered(random_state(), trainer)
        loaders = _loaders(checkpoint).get(_LIGHTNINGS)
        if loaders:
            _loaders(checkpoint)[_LIGHTNINGS] = loaders = with_what_comes_next(trainer, loaders)
        replicas, own = _replicas_and_own(trainer)
        sums = epoch_sums(trainer) if moment.is_in_epoch and not _is_in_step(trainer) else {}
        loaders_by_replica: dict[int, Any] = {}
        sums_by_replica: dict[int, dict[str, Any]] = {}
        for replica, states, sums_of_rank in _gathered((own, loaders, sums), trainer):
            loaders_by_replica.setdefault(replica, states)
            sums_by_replica.setdefault(replica, {}).update(sums_of_rank)  # of a pipeline's stages the last one logs
        if replicas > 1:
            checkpoint[_OF_LOADERS] = [loaders_by_replica[replica] for replica in sorted(loaders_by_replica)]
        checkpoint[_PROGRESS] = {
            "moment": str(moment),
            "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
            "sums": [sums_by_replica[replica] for replica in sorted(sums_by_replica)],
            "should_stop": _is_to_stop(trainer),
        }

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        replicas, own = _replicas_and_own(trainer)
        loaders = checkpoint.get(_OF_LOADERS, [])
        if len(loaders) == replicas and loaders[own]:
            _loaders(checkpoint)[_LIGHTNINGS] = loaders[own]
        if trainer.state.fn != TrainerFn.FITTING or Path(trainer.ckpt_path or "").name.startswith(_OF_SEARCHES):
            return
        _refuse_searches(trainer)
        if (saved := checkpoint.get(_PROGRESS)) is None:  # without this callback
            return
        states = checkpoint.get(RANDOM_STATES, [])
        state = checkpoint.get(RANDOM_STATE) or (states[own] if own < len(states) else {})
        self._saved, self._restore = saved, partial(restore_random_state, state)
        moment = SavedMoment(saved["moment"])
        _count_as_completed(checkpoint["loops"]["fit_loop"], moment)
        if moment.is_in_epoch:
            # Not every rank logs what a step logs.
            layout = getattr(trainer.strategy, "layout", None)
            logs = len(saved["sums"]) == replicas and (not isinstance(layout, Layout) or layout.is_last_stage)

            def begin() -> None:
                self._restore()
                if logs:
                    continue_sums(trainer, saved["sums"][own])

            self._put_back = continue_epoch(
                trainer,
                begin,
                finish=moment is not SavedMoment.BETWEEN,
                validated=moment is SavedMoment.VALIDATED,
                should_stop=saved["should_stop"],
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saved, self._saved = self._saved, {}
        if not saved:
            return
        trainer.callback_metrics.update(saved["metrics"])
        if trainer.strategy.restore_checkpoint_after_setup:
            # Lightning has asked timers in on_fit_start, before the strategy had read how much of their time is over.
            for timer in callbacks_of(trainer):
                if isinstance(timer, Timer):
                    timer.on_fit_start(trainer)
        if saved["should_stop"]:
            rank_zero_info(
                "The run was saved when something, such as EarlyStopping, had set trainer.should_stop: it ends as it "
                "would have. To train on, resume it from an earlier checkpoint."
            )
        moment = SavedMoment(saved["moment"])
        if not moment.is_in_epoch:
            # Before the first epoch, the loaders have yet to draw.
            begin = self._restore if trainer.current_epoch > 0 else lambda: None
            self._put_back = continue_after_epoch(trainer, begin, stepped=moment is SavedMoment.OVER)
            trainer.should_stop |= saved["should_stop"]  # unless min_epochs or min_steps say otherwise

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._saved = {}
        self._put_back()  # or the next run of this Trainer would go on as this one
        if getattr(trainer.strategy, "saves_as_lightning", False):
            # Lightning tells the strategy last. The callbacks that save come after this one, and are to save alone.
            trainer.strategy.on_exception(exception)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.callback_metrics.update(self._saved.get("metrics", {}))  # still here if nothing was left to train
        self._saved = {}
        self._put_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of": "generators"}  # without a state, Lightning wouldn't warn of a run that is resumed without it


def _is_in_step(trainer: pl.Trainer) -> bool:
    """Is a batch under way that will be trained once more, and may have logged already?"""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batch.processed < batch.started)


def _is_to_stop(trainer: pl.Trainer) -> bool:
    """Is the run to end for another reason than ``max_time``? A resumed run may have more time."""
    left = [timer.time_remaining() for timer in callbacks_of(trainer) if isinstance(timer, Timer)]
    return trainer.should_stop and not any(seconds is not None and seconds <= 0 for seconds in left)


def _warn_of_what_is_lost(trainer: pl.Trainer, moment: SavedMoment) -> None:
    """Warn that gradients and other ranks' states aren't saved, and that work that has begun, and is done once more,
    has drawn random numbers, and may have logged, already."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    update = trainer.accumulate_grad_batches
    ended = batch.processed == batch.ready and ends_update(trainer)
    if moment.is_in_epoch and batch.processed % update and not ended:
        rank_zero_warn(
            "Saved in the middle of an update, whose gradients are in no checkpoint: a resumed run differs in it. Save "
            f"and validate after numbers of batches that are multiples of accumulate_grad_batches={update}."
        )
    if _is_in_step(trainer):
        rank_zero_warn(
            "Saved inside a training step. A resumed run does the step once more, with other random numbers, and what "
            "it logs with on_epoch=True covers the rest of the epoch only. Save in on_train_batch_end."
        )
    elif trainer.validating and moment is SavedMoment.TRAINED:
        rank_zero_warn(
            "Saved inside a validation. A resumed run validates once more, with other random numbers. Save in "
            "on_validation_end."
        )
    if trainer.interrupted and trainer.world_size > 1:
        rank_zero_warn(
            "Saved after an error, when other ranks may have left: the random states, the place in the data and the "
            "sums over the epoch are those of rank 0 only, so a resumed run is not the same."
        )


def _loaders(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The place in a checkpoint that holds the states of loaders, under :data:`_LIGHTNINGS`."""
    return checkpoint["loops"]["fit_loop"]["state_dict"]


def _replicas_and_own(trainer: pl.Trainer) -> tuple[int, int]:
    """The number of replicas, and the one that this rank belongs to."""
    sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return sampler["num_replicas"], sampler["rank"]


def _gathered(mine: Any, trainer: pl.Trainer) -> list[Any]:
    """What every rank passes, by rank; on rank 0 only. After an error others may have left: nothing is gathered, and
    the list holds this rank's alone."""
    if trainer.world_size == 1 or trainer.interrupted:
        return [mine]
    return gather_objects_on_first(mine, None) or []


def _count_as_completed(loops: Mapping[str, Any], moment: SavedMoment) -> None:
    """Count what was processed as completed, since this callback does the rest of it, and what was not as not begun. A
    batch for which ``on_train_batch_start`` returned -1 is processed without being started."""
    batches = loops["epoch_loop.batch_progress"]
    batches["is_last_batch"] &= batches["current"]["ready"] == batches["current"]["processed"]
    for progress in (batches, *([loops["epoch_progress"]] if moment is SavedMoment.EPOCH else [])):
        for counters in (progress["total"], progress["current"]):
            counters.update(dict.fromkeys(counters, counters["processed"]))


def _refuse_searches(trainer: pl.Trainer) -> None:
    """Refuse Lightning's searches before a run in a run that is resumed. After a search they restore the state from
    before it, which discards the loaded checkpoint: the run would silently start over."""
    for callback in callbacks_of(trainer):
        if any(isinstance(callback, kind) and type(callback).on_fit_start is kind.on_fit_start for kind in _SEARCHES):
            raise ValueError(
                f"{type(callback).__name__} can't search in a run that is resumed (ckpt_path={trainer.ckpt_path}), "
                f"which would begin anew. Leave it out: the learning rate is in the checkpoint. Set the batch size by "
                f"hand."
            )
