"""What ``training_step`` does to the whole run, where it is called for each microbatch or replica: a refusal, or a
warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.failures import assert_refused
from tests.strategies.observed import Net, fit
from tests.strategies.test_lightning_idioms import LAYOUTS
from tools.workers.pool import Failure


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("late", loss, on_step=False, on_epoch=True)
        self.at_end(loss, batch_idx)
        return loss

    def at_end(self, loss: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        self.rate = torch.tensor(0.1)
        optimizer = torch.optim.SGD([{"params": self.net[0].parameters()}, {"params": self.net[2:].parameters()}], 0.1)
        optimizer.param_groups[1]["lr"] = self.rate
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


def branches_on_the_loss(self: Any, loss: Tensor, batch_idx: int) -> None:
    if loss > 100:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def steps_later(self: Any, loss: Tensor, batch_idx: int) -> None:
    if batch_idx == 1:
        self.lr_schedulers().step()


def stops(self: Any, loss: Tensor, batch_idx: int) -> None:
    if loss < self.below:
        self.trainer.should_stop = True


BranchesOnTheLoss = type("BranchesOnTheLoss", (Logs,), {"at_end": branches_on_the_loss})
StepsAScheduler = type("StepsAScheduler", (Logs,), {"at_end": lambda self, *_: self.lr_schedulers().step()})
StepsLater = type("StepsLater", (Logs,), {"at_end": steps_later})
ReadsAMetric = type("ReadsAMetric", (Logs,), {"at_end": lambda self, *_: self.trainer.callback_metrics.get("loss")})
Stops = type("Stops", (Logs,), {"at_end": stops, "below": 1.1})
StopsAtOnce = type("StopsAtOnce", (Logs,), {"at_end": stops, "below": 10.0})


class ReadsEarlier(Logs):
    """Scales its loss by that of the batch before, and by that of the epoch before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = float(self.trainer.callback_metrics.get("loss", 1.0))
        loss = super().training_step(batch, batch_idx) * before
        return loss * float(self.trainer.callback_metrics.get("late", 1.0))


class OnTheSecondReplica(Logs):
    """It alone counts its steps, logs what may be a count, and would stop after some microbatches."""

    calls = 0

    def at_end(self, loss: Tensor, batch_idx: int) -> None:
        if self.trainer.strategy.layout.index("data") == 1:  # type: ignore[attr-defined]
            self.calls += 1
            self.log("hits", loss.detach() * 0 + 2)
            if self.calls % 2 == 1:
                self.trainer.should_stop = True


class EmaLoss(nn.Module):
    """A loss that keeps averages: in a buffer, and in a number. It counts its calls, and keeps what is equal anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.last, self.calls, self.kept = 0.0, 0, torch.zeros(2)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.last, self.calls, self.kept = loss.item(), self.calls + 1, self.kept + 1
        return loss


class KeepsAnAverage(Net):
    def build(self) -> None:
        self.criterion = EmaLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(("kind", "schedule", "words"), [
    (BranchesOnTheLoss, "1f1b", ["'lr' of SGD"]),
    (StepsAScheduler, "zbv", ["StepLR", "on_train_batch_start"]),
    (ReadsAMetric, "async", ["'loss'", "on_train_batch_end"]),
])  # fmt: skip
def test_what_a_step_does_to_the_run_is_refused(refused: Any, kind: Any, schedule: str, words: list[str]) -> None:
    refused(["training_step", *words], fit, 2, kind, *LAYOUTS[schedule], error="RuntimeError")


def test_what_only_a_later_step_does_is_refused_in_it(launch: Any) -> None:
    last, first = launch(fit, 2, StepsLater, *LAYOUTS["async"], expect_errors=True)
    assert_refused([last], "RuntimeError", ["training_step", "StepLR", "on_train_batch_start"])
    assert isinstance(first, Failure) and "PeerLostError" in first


def test_metrics_of_earlier_steps_are_read_as_in_one_process(launch: Any) -> None:
    (expected,) = launch(fit, 1, ReadsEarlier)
    for report in launch(fit, 2, ReadsEarlier, *LAYOUTS["zbv"]):
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-10)


def test_microbatches_that_disagree_about_the_end_are_warned_of(launch: Any) -> None:
    for kind, warns in ((Stops, True), (StopsAtOnce, False)):
        first, second = launch(fit, 2, kind, *LAYOUTS["async"])
        assert bool(first.warned_of("trainer.should_stop")) == warns
        assert len(first.losses) == len(second.losses) < 10


def test_what_only_the_second_replica_sees_is_warned_of(launch: Any) -> None:
    options = {"stages": 1, "microbatches": 2}
    first, second = launch(fit, 2, OnTheSecondReplica, "sync", options, max_steps=1)
    for words in ("trainer.should_stop", "'hits'", "keeps and changes 'calls'"):
        assert len(second.warned_of(words)) == 1, words
        assert not first.warned_of(words), words


def test_a_state_of_which_each_replica_has_its_own_is_warned_of(launch: Any) -> None:
    (report,) = launch(fit, 1, KeepsAnAverage, "data", {}, devices=2)
    (text,) = report.warned_of("criterion")
    assert "'criterion.average'" in text and "'criterion.last'" in text
    assert "criterion.calls" not in text and "criterion.kept" not in text
