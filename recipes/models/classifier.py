"""The example image classifiers: a perceptron, and LeNet-5 (LeCun et al. 1998) reduced to small images."""

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


class MLP(Classifier):
    """Flattens an image of ``features`` numbers and passes it through ``layers`` hidden layers of ``width`` units with
    ReLU and dropout, in one ``nn.Sequential``."""

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        features: int = 64,
        classes: int = 10,
        width: int = 128,
        layers: int = 3,
        dropout: float = 0.0,
    ) -> None:
        sizes = [features, *[width] * layers]
        hidden = [
            nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
            for inputs, outputs in zip(sizes, sizes[1:], strict=False)
        ]
        net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))
        super().__init__(net, classes, optimizer, scheduler)
        self.save_hyperparameters()

    def configure_tensor_parallel(self) -> dict[str, str]:
        """Pairs of hidden layers divide what is between them; one that is left over gathers what it computes."""
        layers = range(1, self.hparams["layers"] + 1)  # of the net, after the flattening
        styles = {i: "column" if i % 2 else "row" for i in layers}
        if len(layers) % 2:
            styles[layers[-1]] = "column_gather"
        return {f"net.{i}.0": style for i, style in styles.items()}


class LeNet(Classifier):
    """Two convolutions with pooling, then three linear layers, in one flat ``nn.Sequential``. Height and width of the
    image are ``size``, a multiple of 4."""

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        channels: int = 1,
        size: int = 8,
        classes: int = 10,
    ) -> None:
        if size % 4:
            raise ValueError(f"model.size={size} is not a multiple of 4: two poolings each halve the image")
        net = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=3, padding=1),  # [batch, 6, size, size]
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=3, padding=1),  # [batch, 16, size / 2, size / 2]
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (size // 4) ** 2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
        super().__init__(net, classes, optimizer, scheduler)
        self.save_hyperparameters()

    def configure_tensor_parallel(self) -> dict[str, str]:
        """The two wide linear layers divide the 120 units between them; the convolutions and the output are small."""
        return {"net.7": "column", "net.9": "row"}
