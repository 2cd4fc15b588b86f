"""Code that runs between two batches of a run, and at the beginning of a run that is resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_parallel.lightning_private.launching import callbacks_of
from lightning_parallel.lightning_private.replaced import Instead, end_replacement, replaced


def end_replacements(trainer: pl.Trainer) -> None:
    """End all replacements that were to be used at some moment of a run. The run has ended, and the moment may not have
    come."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        for name in [*vars(loop)]:
            while isinstance(found := vars(loop).get(name), Instead):
                end_replacement(loop, name, found)


def before_each_batch(trainer: pl.Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call()`` called before each training batch, after all that belongs to the one before: its hooks,
    schedulers and validation. Lightning's own broadcast there, by which rank 0 reports a SIGTERM, is left out. Returns
    a function that ends it."""
    loop = trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        call()
        type(loop).advance(loop, fetcher)

    both = replaced(loop, "advance", advance), replaced(loop, "_broadcast_sigterm_tensor", lambda: None)

    def put_back() -> None:
        for each in both:
            each()

    return put_back


def around_step_hooks(plugin: Precision, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Have ``begin()`` called when an update's gradients are complete, before the hooks that see them and the clipping,
    and ``end()`` after these, before the optimizer's own work. Public hooks are the user's to override. Returns a
    function that ends it."""

    def hooks(module: pl.LightningModule, optimizer: Any) -> None:
        begin()
        type(plugin)._after_closure(plugin, module, optimizer)
        end()

    return replaced(plugin, "_after_closure", hooks)


def before_first_batch(trainer: pl.Trainer, call: Callable[[], None]) -> None:
    """Have ``call()`` called once, right before the first batch of the run is loaded."""
    loop = trainer.fit_loop.epoch_loop

    def once(fetcher: Any) -> None:
        put_back()
        loop.on_run_start(fetcher)
        call()

    put_back = replaced(loop, "on_run_start", once)


def before_loaders_begin(trainer: pl.Trainer, call: Callable[[], None]) -> None:
    """Have ``call()`` called once, when the module has made its data loaders and none has drawn an order yet."""
    fit = trainer.fit_loop

    def once() -> None:
        put_back()
        fit._load_combined_loader_states()
        call()

    put_back = replaced(fit, "_load_combined_loader_states", once)


def restart_nothing(trainer: pl.Trainer) -> None:
    """Make the loops treat the state they have loaded as one between two batches or two epochs. Otherwise Lightning
    takes it for one inside a validation or at an epoch's end: it would repeat what follows there, and leave plateau
    schedulers out of the epoch."""
    trainer.fit_loop._restarting = False  # its setter makes it true where the length is given in steps
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop.epoch_loop.reset_restart_stage()


def begin_batch_again(trainer: pl.Trainer, *, should_stop: bool) -> None:
    """Go on from a checkpoint that was saved inside a batch: train that batch, even if the run is to stop after it.
    Called before the first batch."""
    loop = trainer.fit_loop.epoch_loop
    restart_nothing(trainer)

    def advance(fetcher: Any) -> None:
        put_back()
        trainer.should_stop |= should_stop  # not before, or the batch would be left out
        loop.advance(fetcher)

    put_back = replaced(loop, "advance", advance)


def finish_batch(trainer: pl.Trainer, *, validated: bool, should_stop: bool = False) -> None:
    """Go on from a checkpoint that was saved after a batch was trained: do the rest of that batch (the validation that
    is due, schedulers, counters) before the next one is loaded. Called before the first batch.

    Args:
        validated: the checkpoint was saved at the end of the validation, which isn't repeated.
        should_stop: the run ends after this batch. The Trainer must not know this before.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        put_back()
        restart_nothing(trainer)
        loop._skip_next_val = validated
        trainer.should_stop |= should_stop
        # No batch is trained. What Lightning does after one finishes the last one.

    put_back = replaced(loop, "advance", advance)


def let_the_last_step_finish(trainer: pl.Trainer) -> None:
    """Go on from a checkpoint of a run's last step: train nothing, but don't leave before :func:`finish_batch`. Called
    before the loops run."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

    def run() -> None:
        put_back()
        steps = loop.max_steps
        if loop.global_step != steps:
            fit.run()
            return

        def on_run_start(fetcher: Any) -> None:
            loop.max_steps = steps
            put_back_start()
            loop.on_run_start(fetcher)

        loop.max_steps = steps + 1
        put_back_start = replaced(loop, "on_run_start", on_run_start)
        try:
            fit.run()
        finally:
            loop.max_steps = steps

    put_back = replaced(fit, "run", run)


def finish_epoch(trainer: pl.Trainer, *, stepped: bool) -> None:
    """Go on from a checkpoint that was saved at the end of an epoch: step the plateau schedulers, unless they have
    ``stepped``. Loaders begin the next epoch after its first hooks, as in an uninterrupted run; Lightning has begun
    them already."""
    trainer.fit_loop._resuming_from_checkpoint = False
    loop, epoch = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if loop._num_ready_batches_reached() and not stepped:
        epoch.completed -= 1  # the epoch counts
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epoch.completed += 1


def restore_metrics(trainer: pl.Trainer, metrics: dict[str, Tensor]) -> None:
    """Put what was logged before the checkpoint into ``trainer.callback_metrics``, which plateau schedulers and
    callbacks read."""
    trainer._logger_connector._callback_metrics.update(metrics)


def in_mid_epoch(trainer: pl.Trainer) -> bool:
    """At the start of training: does the run go on inside an epoch that an earlier run has begun?"""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return epochs.processed < epochs.ready


def ends_update(trainer: pl.Trainer) -> bool:
    """Was the last batch the last one of its update? Updates may accumulate several batches."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def time_without_broadcasts(trainer: pl.Trainer) -> Callable[[], None]:
    """Have each rank check ``max_time`` by its own clock after each batch. Lightning's Timer broadcasts rank 0's
    answer, for which all ranks would wait. Returns a function that ends it."""

    def watch(timer: Timer) -> Callable[[], None]:
        told: list[bool] = []

        def on_train_batch_end(*args: Any) -> None:
            left = timer.time_remaining() if timer._interval == "step" else None
            if left is not None and left <= 0:
                if not told:
                    rank_zero_info(f"Time limit reached after {timer.time_elapsed():.0f} s: training ends.")
                    told.append(True)
                trainer.should_stop = True

        return replaced(timer, "on_train_batch_end", on_train_batch_end)

    timers = [watch(callback) for callback in callbacks_of(trainer) if isinstance(callback, Timer)]

    def put_back() -> None:
        for each in timers:
            each()

    return put_back
