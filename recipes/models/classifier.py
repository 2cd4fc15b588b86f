"""What the example image classifiers share: the steps, their losses and metrics, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from recipes.models.optimizer import configure


class Classifier(L.LightningModule):
    """Trains ``net``, images [batch, ...] -> logits [batch, classes], with cross entropy.

    A batch is ``(images, labels)``; labels are int64 [batch]. Logs ``train_loss``, ``val_loss``, ``val_acc``,
    ``test_loss`` and ``test_acc``.
    """

    def __init__(
        self,
        net: nn.Module,
        classes: int,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = dict(optimizer)
        self.scheduler = dict(scheduler) if scheduler else None
        self.val_acc = MulticlassAccuracy(classes, average="micro")
        self.test_acc = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_acc(logits, labels)
        self.log("test_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.net.parameters() if parameter.ndim == 2]
        return configure(self.parameters(), self.optimizer, self.scheduler, matrices[:-1])  # the last is the output's
