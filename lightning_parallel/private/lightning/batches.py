"""Code that runs between two batches of a run, and at the beginning of a run that is resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.private.lightning.replaced import replaced


def between_batches(
    trainer: pl.Trainer, begins: Callable[[], None], ended: Callable[[], None], met: Callable[[], None]
) -> Callable[[], None]:
    """Have functions called between batches. Lightning's own broadcast there, by which rank 0 reports a SIGTERM, is
    left out. To be called in a callback's ``on_train_start``. Returns a function that ends it.

    ``ended`` and ``met`` are for ``trainer.should_stop``: they are called wherever code that may have set it has run,
    before Lightning reads it.

    Args:
        begins: called before each training batch, after all that belongs to the one before: its hooks, schedulers and
            validation.
        ended: called after a batch's hooks.
        met: called where all ranks are between the same two batches: after the hooks at the beginning of the run and of
            an epoch, after a validation, and after the hooks at an epoch's end.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        begins()
        type(loop).advance(loop, fetcher)
        ended()

    def validate() -> Any:
        outputs = type(loop.val_loop).run(loop.val_loop)
        met()
        return outputs

    def then_met(function: Callable[..., None], *args: Any) -> None:
        function(*args)
        met()

    end = ExitStack()
    end.callback(replaced(trainer.strategy, "on_train_start", partial(then_met, trainer.strategy.on_train_start)))
    end.callback(replaced(loop, "reset", partial(then_met, type(loop).reset, loop)))
    end.callback(replaced(loop, "advance", advance))
    end.callback(replaced(loop, "_broadcast_sigterm_tensor", lambda: None))
    end.callback(replaced(loop.val_loop, "run", validate))
    end.callback(replaced(fit, "on_advance_end", partial(then_met, type(fit).on_advance_end, fit)))
    return end.close


def where_loaders_end(trainer: pl.Trainer, ended: Callable[[], None]) -> Callable[[], None]:
    """Have a function called where the loaders of an epoch, an evaluation or a prediction have given their last batch,
    before anything that replicas may do together at its end. Returns a function that ends it."""
    loop = trainer.fit_loop.epoch_loop

    def run(fetcher: Any) -> None:
        type(loop).run(loop, fetcher)
        ended()

    def first(function: Callable[[Any], Any], of: Any) -> Any:
        ended()
        return function(of)

    end = ExitStack()
    end.callback(replaced(loop, "run", run))
    for each in (loop.val_loop, trainer.validate_loop, trainer.test_loop):  # for each of several loaders
        hook = partial(first, type(each)._store_dataloader_outputs, each)
        end.callback(replaced(each, "_store_dataloader_outputs", hook))
    predict = trainer.predict_loop
    end.callback(replaced(predict, "on_run_end", partial(first, type(predict).on_run_end, predict)))
    return end.close


def read_by_loop(trainer: pl.Trainer) -> tuple[list[Any], int, bool]:
    """What the loop reads that runs: its loaders, how many of their batches it has begun, and whether it takes the
    latest for the last."""
    loop: Any = trainer._active_loop
    progress = getattr(loop, "epoch_loop", loop).batch_progress
    return loop._combined_loader.flattened, progress.current.ready, progress.is_last_batch


def around_step_hooks(plugin: Precision, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Have ``begin()`` called when an update's gradients are complete, before the hooks that see them and the clipping,
    and ``end()`` after these, before the optimizer's own work. Public hooks are the user's to override. Returns a
    function that ends it."""

    def hooks(module: pl.LightningModule, optimizer: Any) -> None:
        begin()
        type(plugin)._after_closure(plugin, module, optimizer)
        end()

    return replaced(plugin, "_after_closure", hooks)


def continue_epoch(
    trainer: pl.Trainer, begin: Callable[[], None], *, finish: bool, validated: bool, should_stop: bool
) -> Callable[[], None]:
    """Go on inside an epoch, from a checkpoint whose batches all count as completed. Lightning would take it for one
    inside a validation, or leave the validation and the schedulers out. Called before the loops run. Returns a function
    that ends it, if the run hasn't come to it.

    Args:
        begin: called right before the first batch is loaded, when all that draws at the start of a run has drawn.
        finish: do what was left of the last batch first: the validation that is due, schedulers, counters.
        validated: leave out this validation.
        should_stop: the run ends as soon as the last batch is finished. The Trainer must not know this before.
    """
    fit, loop, steps = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.max_steps
    end = ExitStack()

    def run() -> None:
        if finish and loop.global_step == steps:
            loop.max_steps += 1  # or the run would end before it begins
        try:
            type(fit).run(fit)
        finally:
            loop.max_steps = steps

    def on_run_start(fetcher: Any) -> None:
        end.close()
        loop.max_steps = steps
        if fit._combined_loader_states_to_load:  # the loaders were there before: trainer.estimated_stepping_batches
            fit._load_combined_loader_states()
            iter(fetcher)
        loop.on_run_start(fetcher)
        _restart_nothing(trainer)
        begin()
        trainer.should_stop |= should_stop
        if finish:
            loop._skip_next_val = validated
            loop.on_advance_end(fetcher)

    end.callback(replaced(fit, "run", run))
    end.callback(replaced(loop, "on_run_start", on_run_start))
    return end.close


def continue_after_epoch(trainer: pl.Trainer, begin: Callable[[], None], *, stepped: bool) -> Callable[[], None]:
    """Go on from a checkpoint that was saved at the end of an epoch, which counts as completed: step the plateau
    schedulers, unless they have ``stepped``. Called when training starts. ``begin()`` is called right before the next
    epoch begins. Loaders begin it after its first hooks, as in an uninterrupted run; Lightning has begun them already.
    Returns a function that ends it, if no epoch comes."""
    fit, loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    fit._resuming_from_checkpoint = False
    if loop._num_ready_batches_reached() and not stepped:
        epoch.completed -= 1  # the epoch counts
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epoch.completed += 1
    _restart_nothing(trainer)

    def on_advance_start() -> None:
        end()
        begin()
        fit.on_advance_start()

    end = replaced(fit, "on_advance_start", on_advance_start)
    return end


def _restart_nothing(trainer: pl.Trainer) -> None:
    """Make the loops treat the state they have loaded as one between two batches or two epochs."""
    trainer.fit_loop._restarting = False  # its setter makes it true where the length is given in steps
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop.epoch_loop.reset_restart_stage()


def validation_has_ended(trainer: pl.Trainer) -> bool:
    """Of a run that validates: is it in the hooks after the validation, ``on_validation_end``?"""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    return loop.batch_progress.is_last_batch and connector._first_loop_iter is None and not loop._logged_outputs


def refuse_validation_by_time(trainer: pl.Trainer) -> None:
    """Refuse a ``val_check_interval`` that is a time: each rank would read its own clock."""
    seconds = trainer._val_check_time_interval  # type: ignore[attr-defined]
    if seconds is not None:
        raise ValueError(
            f"val_check_interval is a time ({seconds:g} s). Each rank reads its own clock, so one would validate while "
            f"another trains, and wait for it. Give a number of batches."
        )


def ends_update(trainer: pl.Trainer) -> bool:
    """Was the last batch the last one of its update? Updates may accumulate several batches."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def time_without_broadcasts(trainer: pl.Trainer) -> Callable[[], None]:
    """Have each rank check ``max_time`` by its own clock after each batch. Lightning's Timer broadcasts rank 0's
    answer, for which all ranks would wait. Returns a function that ends it."""

    end, told = ExitStack(), set[Timer]()
    for timer in callbacks_of(trainer):
        if isinstance(timer, Timer):
            end.callback(replaced(timer, "on_train_batch_end", partial(_stop_in_time, timer, told, trainer)))
    return end.close


def _stop_in_time(timer: Timer, told: set[Timer], trainer: pl.Trainer, *_: Any) -> None:
    left = timer.time_remaining() if timer._interval == "step" else None
    if left is not None and left <= 0 and not trainer.should_stop:
        trainer.should_stop = True  # again in each batch, until all ranks stop
        if timer._verbose and timer not in told:
            told.add(timer)
            elapsed = timedelta(seconds=int(timer.time_elapsed()))  # as Lightning words it:
            rank_zero_info(f"Time limit reached. Elapsed time is {elapsed}. Signaling Trainer to stop.")
