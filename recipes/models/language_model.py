"""What the language models share: the steps, their loss and what they log."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch.nn.functional as F
from torch import Tensor


class LanguageModel(L.LightningModule):
    """``forward`` takes tokens [batch, time] to logits [batch, time, vocabulary]. The loss is their mean cross entropy.

    A batch is ``(tokens, targets)``, both int64 [batch, time]. Logs ``train_loss``, ``val_loss`` and ``test_loss``.
    """

    def _loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)
