"""LightningModules around models of libraries, as a user would write them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 12  # tokens of a sample
VOCABULARY = 64
CLASSES = 5


class Trained(L.LightningModule):
    """A model and a loss, trained by SGD with momentum."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model

    def loss(self, batch: Any) -> Tensor:
        raise TypeError("a module computes its loss here")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


class OwnLoss(Trained):
    """A model that returns its loss, as those of transformers do when they get labels."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class WithAdam(OwnLoss):
    def configure_optimizers(self) -> Any:
        # eps: a gradient that is zero but for rounding (an attention's key bias) must not become a step of full size
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Classifier(Trained):
    """Logits, and their cross-entropy."""

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(logits_of(self.model(inputs)), labels)


class Segmenter(Trained):
    """A class for each pixel."""

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        logits = logits_of(self.model(images))
        return F.cross_entropy(F.interpolate(logits, labels.shape[-2:], mode="bilinear"), labels)


def logits_of(output: Any) -> Tensor:
    """Of what a classifier of transformers or torchvision returns, or of a plain tensor."""
    if isinstance(output, dict) and "out" in output:
        logits: Tensor = output["out"]
        return logits
    return getattr(output, "logits", output)


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """[samples, length]: 0 to 3, which models may keep for padding and the like, are left out."""
    return torch.randint(4, vocabulary, (8, length))


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(8, channels, size, size)


def classes(count: int = CLASSES) -> Tensor:
    return torch.randint(0, count, (8,))
