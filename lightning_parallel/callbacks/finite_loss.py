"""Warns of a loss that is NaN or infinite, and ends the run if asked to.

Losses are kept on their device, and read every tenth batch. Then the ranks agree on whether the run ends, since not all
of them see the same losses::

    batch       5    6    7    8    9   10        11   12   13 ...    20
    loss       2.1  nan  nan  nan  nan  nan       nan  nan  nan       nan
    in a row                                 5                             15
                                             warning                       error, on all ranks

In an asynchronous pipeline only the last stage knows the loss, and the first stage is ahead of it. There the last stage
posts a notice of the end, and the stages drain before they leave.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_parallel.ranks.local_model import local_part
from lightning_parallel.ranks.notice import Notice
from lightning_parallel.results.late_values import LateLoss

_EVERY = 10  # batches between two looks, at most


class FiniteLoss(Callback):
    """Warns once in a run if ``training_step`` returns a loss that is NaN or infinite. After so many such batches in a
    row, all ranks end the run with the same error, a ``FloatingPointError``.

    The strategies of this package bring along ``FiniteLoss(stop_after=None)``, unless the Trainer has one of its own.
    Losses are read every ten batches (or every ``stop_after``, if that is less), so that not every batch waits for a
    GPU. The end may come as many batches late, and in an asynchronous pipeline also by as many as its first stage is
    ahead.

    Only the loss counts. With ``precision="16-mixed"``, gradients overflow now and then, and the scaler skips the
    update; the loss is finite.

    Args:
        stop_after: the number of such batches in a row that ends the run. None: it only warns.

    Raises:
        ValueError: ``stop_after`` is less than 1.
    """

    def __init__(self, stop_after: int | None = 10) -> None:
        if stop_after is not None and stop_after < 1:
            raise ValueError(f"stop_after={stop_after}: give an integer of at least 1, or None, which only warns.")
        self.stop_after = stop_after
        self._every = min(stop_after or _EVERY, _EVERY)
        self._unread: list[tuple[int, Tensor]] = []  # steps and losses
        self._in_a_row = 0
        self._warned = False
        self._notice: Notice | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unread, self._in_a_row, self._warned = [], 0, False
        ahead = getattr(trainer.strategy, "batches_ahead", 0)
        self._notice = Notice(ahead) if ahead and self.stop_after is not None else None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # No loss: the step has skipped the batch, or optimizes by hand. A late one: the last stage looks at it.
        if isinstance(loss, Tensor) and not isinstance(loss, LateLoss):
            self._unread.append((trainer.global_step, local_part(loss)))
        number = trainer.fit_loop.total_batch_idx + 1
        if number % self._every:
            return
        too_many = self._look()
        if self.stop_after is None:
            return
        if self._notice is not None:
            if self._notice.at(number, int(too_many)):
                trainer.strategy.drain()  # type: ignore[attr-defined]  # or others would wait for what is in flight
                self._stop(trainer)
        elif trainer.strategy.reduce_boolean_decision(too_many, all=False):
            self._stop(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the last batches. The end of the epoch has drained an asynchronous pipeline."""
        too_many = self._look()
        if self.stop_after is not None and trainer.strategy.reduce_boolean_decision(too_many, all=False):
            self._stop(trainer)

    def _look(self) -> bool:
        """Read the losses, and warn of the first one that isn't finite. True if there are too many in a row."""
        finite = torch.stack([loss.isfinite().all() for _, loss in self._unread]).tolist() if self._unread else []
        for (step, _), is_finite in zip(self._unread, finite, strict=True):
            self._in_a_row = 0 if is_finite else self._in_a_row + 1
            if not is_finite and not self._warned:
                self._warned = True
                rank_zero_warn(f"The loss is NaN or infinite, for the first time at step {step}.")
        self._unread = []
        return self.stop_after is not None and self._in_a_row >= self.stop_after

    def _stop(self, trainer: pl.Trainer) -> None:
        raise FloatingPointError(
            f"The loss has been NaN or infinite for {self.stop_after} batches in a row, up to step "
            f"{trainer.global_step}. Go on from an earlier checkpoint with a smaller learning rate or with "
            f"gradient_clip_val, or find the first such value with detect_anomaly=True. FiniteLoss(stop_after=None) "
            f"only warns (in the recipes, on_nan=warn)."
        )
