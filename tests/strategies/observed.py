"""A module that logs in every place where Lightning lets it, and a callback that reads what callbacks can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies import harness
from tests.strategies.harness import Losses, Report, collect
from tests.strategies.models import Rows
from tools.workers.worker import texts_of_warnings

OPTIONS: dict[str, dict[str, Any]] = {"sync": {"microbatches": 2}, "async": {"microbatches": 2}}
CLASSES, WIDTH = 3, 6


def loader(samples: int = 12, batch: int = 4, seed: int = 3, **options: Any) -> DataLoader[Any]:
    """Batches that split into equal microbatches, so that a plain mean over microbatches is one over samples."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(Rows(list(zip(inputs, labels, strict=True))), batch_size=batch, **options)


class Net(L.LightningModule):
    """A classifier.

    Args:
        moves: False gives gradients of zero. The weights stay, so an asynchronous run logs what a single process does.
        given: attributes that another kind reads.
    """

    def __init__(self, moves: bool = True, **given: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.moves = moves
        vars(self).update(given)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.build()

    def build(self) -> None:
        """Others add or change layers here."""

    def logits(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def logits_and_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return logits, loss if self.moves else loss.detach() + 0 * loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logits_and_loss(batch)[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Observed(Net):
    """Logs in every place."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__(moves)
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.by_hand = MulticlassAccuracy(CLASSES, average="macro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="macro")
        self.val_best = MaxMetric()
        self.test_mean = MeanMetric()
        self.training_outputs: list[Tensor] = []
        self.validation_outputs: list[Tensor] = []
        self.test_outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("train_plain", loss, sync_dist=True)
        self.log_dict({"train_sum": loss * 0 + 1, "train_norm": logits.norm(dim=1).mean()}, on_epoch=True)
        self.log("train_max", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        self.by_hand.update(logits, batch[1])
        self.training_outputs.append(loss.detach())
        return {"loss": loss, "size": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", float(batch_idx + 1), on_step=True, on_epoch=True)
        self.log("batch_end_synchronised", float(batch_idx + 1), on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("train_mean_by_hand", torch.stack(self.training_outputs).mean(), sync_dist=True)
        self.log("train_acc_by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.training_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_both", loss + 1, on_step=True, on_epoch=True)
        self.log("val_hidden", loss + 2, logger=False)
        self.val_acc(logits, batch[1])
        self.val_best.update(logits)
        self.log_dict({"val_acc": self.val_acc, "val_best": self.val_best})
        gathered = self.all_gather(loss)
        assert isinstance(gathered, Tensor)
        self.validation_outputs.append(gathered)
        return {"loss": loss, "logits": logits}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val_batch_end", outputs["logits"].mean(), on_epoch=True, on_step=False)

    def on_validation_epoch_end(self) -> None:
        values = torch.stack(self.validation_outputs)
        self.validation_outputs.clear()
        self.log("val_mean_by_hand", values.mean(), prog_bar=True)
        self.log("val_trend", values.mean() * (1 + self.current_epoch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        self.test_mean.update(loss)
        self.log_dict({"test_loss": loss, "test_mean": self.test_mean}, on_epoch=True, sync_dist=True)
        self.test_outputs.append(loss)

    def on_test_epoch_end(self) -> None:
        self.log("test_mean_by_hand", torch.stack(self.test_outputs).mean())
        self.test_outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).argmax(-1)


class Reader(Callback):
    """Notes the metrics that a callback finds, at each place where one may decide something."""

    def __init__(self, every_step: bool) -> None:
        self.every_step = every_step
        self.seen: list[tuple[str, dict[str, float]]] = []

    def note(self, place: str, trainer: L.Trainer) -> None:
        self.seen.append((place, {name: float(value) for name, value in trainer.callback_metrics.items()}))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.every_step:
            self.note(f"batch {trainer.global_step}", trainer)

    def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note("validation epoch end", trainer)

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note("validation end", trainer)

    def on_test_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note("test end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note("epoch end", trainer)

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note("train end", trainer)


def make_trainer(strategy: str, callbacks: list[Callback], options: dict[str, Any] | None = None, **given: Any) -> Any:
    """As the harness's; two microbatches unless ``options`` say otherwise."""
    return harness.make_trainer(strategy, callbacks, OPTIONS.get(strategy, {}) if options is None else options, **given)


def fit(
    kind: Callable[[], Any],
    strategy: str = "single",
    options: dict[str, Any] | None = None,
    *,
    samples: int = 20,
    batch: int = 4,
    validates: bool = False,
    **given: Any,
) -> Report:
    """Train one in float64, on the same batches on all ranks, unless ``given`` says otherwise."""
    module, report = kind(), Report()
    trainer = make_trainer(strategy, [Losses(report)], options, **{"use_distributed_sampler": False} | given)
    with texts_of_warnings() as report.warnings:
        trainer.fit(module, loader(samples, batch), *([loader(8, 4, 5)] if validates else []))
    return collect(report, trainer, module)
