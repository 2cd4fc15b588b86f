"""Logging from microbatches: what Lightning's metrics show has to be what the whole batch would show."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from lightning_parallel.batch import batch_size, sizes, split
from lightning_parallel.losses.normaliser import BatchLoss, Rule
from lightning_parallel.results.logs import LogRecorder, loggers_through


class Logging(L.LightningModule):
    """A plain module: what it logs must not depend on the number of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.accuracy = Accuracy(task="multiclass", num_classes=2)
        self.history: list[dict[str, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits: Tensor = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, True, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"rows": float(len(x)), "first": x.sum()}, on_epoch=True, reduce_fx="sum")
        self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx=max)
        self.log("smallest", x.min(), reduce_fx="min", on_epoch=True)
        for factor in (1, 2):
            self.log("twice", factor * x.mean(), on_epoch=True)
        self.log("number", x.mean().item(), on_epoch=True)
        tokens = int((y + 1).sum())  # a mean over something else than samples
        self.log("by_tokens", x.sum() / tokens, batch_size=tokens, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class InMicrobatches(Logging):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        recorder = LogRecorder()
        n = batch_size(batch)
        weights = sizes(n, min(self.count, n))
        losses = []
        self.log = recorder.log  # type: ignore[method-assign]
        for weight, part in zip(weights, split(batch, len(weights)), strict=True):
            recorder.begin(weight)
            losses.append(super().training_step(part, batch_idx) * weight / n)
        del self.log
        recorder.replay(self.log)
        return torch.stack(losses).sum()


def metrics_of(module: Logging) -> list[dict[str, float]]:
    torch.manual_seed(3)
    x, y = torch.randn(23, 3), torch.randint(2, (23,))  # the last batch is of 3
    rows: Any = list(zip(x, y, strict=True))
    module.load_state_dict(torch.nn.Module.state_dict(module) | {"layer.weight": torch.ones(2, 3).triu()})
    module.layer.bias.data.zero_()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=10))
    return [*module.history, {name: float(value) for name, value in trainer.callback_metrics.items()}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 3, 4])
def test_metrics_do_not_depend_on_the_number_of_microbatches(count: int) -> None:
    expected, found = metrics_of(Logging()), metrics_of(InMicrobatches(count))
    assert len(expected) == len(found) == 7
    assert {"loss_step", "loss_epoch", "accuracy", "largest_step"} <= set(expected[-1])
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_number_of_a_batch_in_which_nothing_counts_is_that_of_a_microbatch() -> None:
    recorder = LogRecorder()
    batch = BatchLoss([1, 1], Rule.COUNTS)
    parameter = torch.ones(2, requires_grad=True)
    for place in range(2):
        mask = torch.zeros(2)
        loss = (parameter * mask).sum() / mask.sum().clamp(min=1)
        batch.add(place, loss)
        recorder.begin(1)
        recorder.log("loss", loss.item())
    calls: dict[str, float] = {}
    recorder.replay(lambda name, value, **_: calls.update({name: value}), batch)
    assert calls == {"loss": 0.0}


def test_a_trial_writes_to_no_logger_and_a_watched_step_is_noted() -> None:
    logger, noted = CSVLogger("."), list[int]()
    logger.log_metrics = MagicMock()  # type: ignore[method-assign]
    trainer = MagicMock(loggers=[logger])
    with loggers_through(trainer):
        (stand_in,) = trainer.loggers
        assert isinstance(stand_in, CSVLogger) and stand_in.save_dir == logger.save_dir
        stand_in.log_metrics({"x": 1.0})
        stand_in.experiment.add_image("x", None)
    assert trainer.loggers == [logger] and not logger.log_metrics.called
    with loggers_through(trainer, lambda: noted.append(1)):
        assert trainer.loggers[0].name and not noted
        trainer.loggers[0].log_metrics({"x": 1.0})
    assert noted and logger.log_metrics.call_count == 1
