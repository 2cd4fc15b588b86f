"""Refuses Lightning's searches before a run (tuners) in a run that is resumed. After a search they restore the state
from before it, which discards the loaded checkpoint: the run would silently start over."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_parallel.lightning_private import callbacks_of

_BEFORE_A_RUN = (
    (LearningRateFinder, "the learning rate that it has found is in the checkpoint"),
    (BatchSizeFinder, "set the batch size that it had found by hand"),
)
_THEIR_OWN = (".lr_find_", ".scale_batch_size_")  # what Lightning calls the states that they begin with


def is_of_search(trainer: pl.Trainer) -> bool:
    """Is the checkpoint that the Trainer loads the state from before a search?"""
    return Path(trainer.ckpt_path or "").name.startswith(_THEIR_OWN)


def refuse_searches(trainer: pl.Trainer) -> None:
    """Refuse the callbacks that search before a run. Called when a run loads the checkpoint to resume from.

    Raises:
        ValueError: it names the callback.
    """
    for callback in callbacks_of(trainer):
        for kind, instead in _BEFORE_A_RUN:
            if isinstance(callback, kind) and type(callback).on_fit_start is kind.on_fit_start:
                raise ValueError(
                    f"{type(callback).__name__} can't search in a run that is resumed (ckpt_path={trainer.ckpt_path}), "
                    f"which would begin anew. Leave it out: {instead}."
                )
