"""Callbacks that the strategies add, and those of Lightning's that they refuse, which work on the whole model in one
process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)

from lightning_parallel.callbacks.exact_resume import ExactResume
from lightning_parallel.callbacks.finite_loss import FiniteLoss
from lightning_parallel.callbacks.preemption import Preemption
from lightning_parallel.private.lightning.launching import callbacks_of

Reasons = Mapping[type[Callback], str]

# What is refused on several ranks, where these hold parts of the model or save parts of it, where the parts are stages,
# and by the asynchronous pipeline. Subclasses too.
ON_SEVERAL_RANKS: Reasons = {
    BatchSizeFinder: (
        "it goes on after one rank has run out of memory, while the other ranks wait for that one. Set the batch size "
        "by hand"
    ),
}
IN_PARTS: Reasons = {
    **ON_SEVERAL_RANKS,
    ModelPruning: (
        "it ranks the values of whole parameters, of which a rank holds a part. Prune a checkpoint after training, or "
        "use DataParallelStrategy or strategy='ddp'"
    ),
    StochasticWeightAveraging: (
        "it averages whole parameters, of which a rank holds a part. Use WeightAveraging, whose weights are equal too, "
        "or EMAWeightAveraging, where each rank averages its part"
    ),
}
IN_STAGES: Reasons = {
    **IN_PARTS,
    BaseFinetuning: (
        "it gives the optimizer parameters of all stages, of which a rank holds those of one. Give the optimizer all "
        "parameters from the start, and call requires_grad_ in on_train_epoch_start"
    ),
}
ASYNCHRONOUS: Reasons = {
    **IN_STAGES,
    LearningRateFinder: (
        "it acts on the loss of every batch, for which the stages of an asynchronous pipeline would wait. Find the "
        "learning rate under PipelineStrategy, or in one process"
    ),
}


def bring_along(trainer: pl.Trainer) -> None:
    """Add the package's callbacks to the Trainer's, where it has none of their kind. Called before the first hook of a
    run. After an error, the user's own ExactResume comes before what may save then, too."""
    callbacks = callbacks_of(trainer)
    callbacks.sort(key=lambda callback: not isinstance(callback, ExactResume))
    for own in (ExactResume(), Preemption(), FiniteLoss(stop_after=None)):
        if not any(isinstance(callback, type(own)) for callback in callbacks):
            callbacks.insert(0, own)


def refuse_saves_after_errors(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that save after an error of a rank, where a checkpoint needs all of them."""
    for callback in callbacks:
        asked = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if asked or isinstance(callback, OnExceptionCheckpoint):
            raise ValueError(
                f"{type(callback).__name__}{'(save_on_exception=True)' * asked} can't save: after an error of one rank "
                f"the others can't be asked for their parts. Save while training goes on, with "
                f"ModelCheckpoint(every_n_train_steps=..., save_last=True)."
            )


def refuse_callbacks(callbacks: Iterable[Callback], refused: Reasons, strategy: str) -> None:
    """Refuse callbacks that can't work under a strategy. ``refused`` maps their classes to the reason and the fix."""
    for callback in callbacks:
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} can't be used under {strategy}: {reason}.")
