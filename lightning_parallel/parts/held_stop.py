"""A stop that the user's step asks for, where stages don't wait for each other between batches.

The last stage comes to a batch's end earlier or later than others do, but all have to stop after the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn


class HeldStop:
    """Holds back a ``trainer.should_stop`` until the stages next meet.

    Args:
        trainer: of the run.
        several: are there several stages?
    """

    def __init__(self, trainer: pl.Trainer, several: bool) -> None:
        self._trainer, self._several = trainer, several
        self._held = False

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        """Around the steps of a batch: a stop that they ask for is held back."""
        before = self._trainer.should_stop
        yield
        if self._several and self._trainer.should_stop and not before:
            self._held, self._trainer.should_stop = True, False
            rank_zero_warn(
                "training_step has set trainer.should_stop. Other stages have begun the next batch, so training ends "
                "where the stages next meet: at the epoch's end, or at a validation or checkpoint before it. To end "
                "after this very batch, set it in on_train_batch_end, by the step's outputs."
            )

    def release(self) -> None:
        """All stages meet: the stop counts from now on."""
        self._trainer.should_stop |= self._held
        self._held = False
