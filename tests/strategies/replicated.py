"""Modules for the replicas of one process: what a user's step may do beside computing a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.models import Base, LeNet


class Forward(LeNet):
    """The loss outside of `forward`, whose calls torch.nn.DataParallel shares out."""

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)


class Normalised(Forward):
    """BatchNorm, whose statistics are of what a replica sees."""

    def build(self) -> None:
        super().build()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        )  # fmt: skip


class Dropping(Forward):
    """Dropout, in a layer that is computed again in the backward."""

    recompute = False

    def build(self) -> None:
        super().build()
        self.hidden = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        logits = self.net(images)
        if self.recompute:
            return checkpoint(self.hidden, logits, use_reentrant=False)
        return self.hidden(logits)


class Recomputing(Dropping):
    recompute = True


class Penalised(Forward):
    """A penalty on the weights; a method that was bound before replicas were made; a hook on a parameter."""

    def build(self) -> None:
        super().build()
        self.bound = self.head_norm
        next(self.parameters()).register_hook(lambda gradient: 3 * gradient)

    def head_norm(self) -> Tensor:
        return self.net[-1].weight.pow(2).sum()

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(parameter.abs().sum() for parameter in self.parameters())
        return super().loss(batch) + 0.01 * penalty + 0.1 * self.bound()


class Observing(Forward):
    """Logs numbers and metrics in every step, and returns more than the loss."""

    def build(self) -> None:
        super().build()
        self.accuracy = MulticlassAccuracy(10)
        self.several = MetricCollection({"mean": MeanMetric(), "all": CatMetric()})
        self.steps = 0
        self.seen: list[Any] = []

    def observe(self, batch: Any, stage: str) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True)
        self.accuracy(logits, labels)
        self.several.update(labels)
        self.log(f"{stage}_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({f"{stage}_rows": float(len(labels)), f"{stage}_top": logits.max()}, reduce_fx="max")
        return {"loss": loss, "logits": logits}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.observe(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.observe(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.observe(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "names": [f"class {label}" for label in logits.argmax(1).tolist()]}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs["logits"])

    def on_train_epoch_end(self) -> None:
        self.labels = self.several["all"].compute()
        self.several.reset()


class Failing(Forward):
    """Can't stand the last share of three: of eight samples, it has two."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) == 2:
            raise KeyError("images")
        return super().forward(images)


MODULES: tuple[type[Base], ...] = (
    Forward, Normalised, Dropping, Recomputing, Penalised, Observing, Failing
)  # fmt: skip
REPLICATED = {model.__name__: model for model in MODULES}
