"""What streams through the stages: each loader's own step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.failures import assert_refused
from tests.strategies.observed import CLASSES, WIDTH, Net, fit, loader, make_trainer
from tests.strategies.test_updates import Teacher


class Skips(Net):
    """Each loader has a step of its own: beside the chain nothing crosses a cut, the first layer's output, or the
    second's; or no layer is called."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 3:
            self.log("loss", batch[0].mean())
            return
        values = [batch[0]]
        for layer in self.net:
            values.append(torch.tanh(layer(values[-1])))
        hidden = values[-1] + values[dataloader_idx] if dataloader_idx else values[-1]
        self.log("loss", F.cross_entropy(self.head(hidden), batch[1]))

    test_step = validation_step


def evaluate(strategy: str, options: dict[str, Any] | None = None) -> list[Any]:
    trainer, module = make_trainer(strategy, [], options), Skips()
    loaders = [loader(8, 4, 5 + i) for i in range(4)]
    results = [trainer.validate(module, loaders, verbose=False), trainer.test(module, loaders, verbose=False)]
    return [value for result in results for metrics in result for value in metrics.items()]


@pytest.mark.parametrize(("stages", "options"), [(4, {}), (1, {"microbatches": 2, "schedule": "zbv"})])
def test_each_loader_s_step_has_what_crosses_the_cuts_in_it(launch: Any, stages: int, options: dict[str, Any]) -> None:
    expected = launch(evaluate, 1, "single")[0]
    assert len(dict(expected)) == 4
    for found in launch(evaluate, stages, "sync", options):
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [value for _, value in found] == pytest.approx([v for _, v in expected], rel=0, abs=1e-12)


class ReadsWeights(Net):
    """Validation reads the first layer's weight beside the last layer; so does training, or it doesn't. Its rate is
    logged before its loss."""

    def read(self) -> Tensor:
        return self.net[0].weight.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) + (self.read() if self.trained else 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.logits_and_loss(batch)[1] + self.read())


def test_an_evaluation_reads_weights_of_other_stages_where_training_does(launch: Any, refused: Any) -> None:
    given = {"samples": 8, "validates": True}
    (expected,) = launch(fit, 1, partial(ReadsWeights, trained=True), **given)
    for report in launch(fit, 2, partial(ReadsWeights, trained=True), "sync", **given):
        assert report.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-12)
    words = ["reads 'net.0.weight', which is on stage 0", "(the first), too"]
    refused(words, fit, 2, partial(ReadsWeights, trained=False), "sync", **given, error="FlowError")


class LeavesLayersOut(Teacher):
    """Training has a target network and a projector at its end. Validation has neither. It asks for values after its
    layers: a metric counts, and a number is kept until the epoch's end."""

    follows = "on_train_batch_end"

    def build(self) -> None:
        super().build()
        self.projector = nn.Sequential(*(nn.Linear(CLASSES, CLASSES) for _ in range(4)))
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        return loss + F.mse_loss(self.projector(logits), self.teacher(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, loss = self.logits_and_loss(batch)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.seen.append(loss.item())

    def on_validation_epoch_end(self) -> None:
        self.log("loss", sum(self.seen) / len(self.seen))
        self.seen.clear()


class Counts(LeavesLayersOut):
    """Training reads how many batches have been validated."""

    validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1.0 + self.validated)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "stages", "options"), [
    (Counts, 4, {"microbatches": 2}), (LeavesLayersOut, 2, {"microbatches": 4, "schedule": "interleaved"}),
])  # fmt: skip
def test_an_evaluation_may_leave_the_last_layers_out(
    launch: Any, kind: type[Net], stages: int, options: dict[str, Any]
) -> None:
    given = {"samples": 8, "validates": True}
    (expected,) = launch(fit, 1, kind, **given)
    for report in launch(fit, stages, kind, "sync", options, **given):
        assert report.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-12)


class LooksAtTheRank(Net):
    """Where the last stage is told to, it logs of the first; what it asks for later must not matter."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first = self.net[0](batch[0])
        x = first
        for layer in self.net[1:]:
            x = layer(x)
        if rank_zero_only.rank == 0:
            self.log("early", first.square().mean())
        assert F.cross_entropy(x, batch[1]).item() > 0


def validated(kind: type[Net], strategy: str) -> dict[str, float]:
    (metrics,) = make_trainer(strategy, []).validate(kind(), loader(8, 4, 5), verbose=False)
    return dict(metrics)


def test_what_only_the_last_stage_logs_reaches_it(launch: Any) -> None:
    """The other ranks' look at the step doesn't see it; the last stage's counts."""
    (expected,) = launch(validated, 1, LooksAtTheRank, "single")
    for found in launch(validated, 3, LooksAtTheRank, "sync"):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)


class FailsOnOneRank(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if rank_zero_only.rank == 1:
            raise KeyError("mine")
        self.logits_and_loss(batch)


def test_an_error_of_one_rank_in_its_first_step_is_told_on_all(launch: Any) -> None:
    failures = launch(validated, 3, FailsOnOneRank, "sync", expect_errors=True)
    assert_refused(failures[1:2], "KeyError", ["mine"])
    assert_refused([failures[0], failures[2]], "RuntimeError", ["rank 1: KeyError: 'mine'"])


class Writes(Net):
    """Predicts in several passes, each of what came of the one before; it may look at that."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for _ in range(3):
            chosen = self.net(x).argmax(-1)
            if self.looks and chosen.sum().item() < 0:
                break
            x = x + chosen[:, None]
        return x


def predict_in_passes(strategy: str, looks: bool, fits: bool) -> Any:
    trainer, module = make_trainer(strategy, [], max_epochs=1), Writes(looks=looks)
    if fits:
        trainer.fit(module, loader())
    return [None if each is None else each.tolist() for each in trainer.predict(module, loader(8, 4, 5)) or []]


@pytest.mark.parametrize("looks", [True, False])
def test_a_prediction_in_several_passes_has_its_layers_on_one_stage_or_is_refused(
    launch: Any, refused: Any, looks: bool
) -> None:
    expected = launch(predict_in_passes, 1, "single", looks, False)[0]
    assert launch(predict_in_passes, 2, "sync", looks, False)[0] == expected
    refused(["'net.0'"], predict_in_passes, 2, "sync", looks, True, error="FlowError")
