"""A callback that saves a run at a moment of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class SavesIn(Callback):
    """Saves the run in one of the hooks of a batch.

    Args:
        hook: such as "on_train_batch_start".
        path: of the checkpoint.
        batch: its number, over all epochs; None: nothing is saved.
    """

    def __init__(self, hook: str, path: Path | str, batch: int | None) -> None:
        def save(trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == batch:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)
