"""What a module changes itself, beside the optimizer: a teacher's weights, a count of steps, the metric of a layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics import CatMetric, MaxMetric, MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.failures import assert_refused
from tests.strategies.harness import Report, joined, largest_difference
from tests.strategies.observed import CLASSES, WIDTH, Net, fit
from tests.thorough import thorough

TWO_STAGES, ONE_STAGE = {"stages": 2, "microbatches": 2}, {"stages": 1, "microbatches": 4}


class ByFrequency(Net):
    """Gradients are divided by how often a label is in the batch."""

    def build(self) -> None:
        self.table = nn.Embedding(CLASSES, CLASSES, scale_grad_by_freq=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]) + self.table(batch[1]), batch[1])


class Teacher(Net):
    """A mean teacher, the target of the loss. It follows in a hook, or in the step. The step may ask for the loss's
    value."""

    follows, asks = "in the step", False

    def build(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.follow("in the step")
        logits, loss = self.logits_and_loss(batch)
        loss = loss + (logits - self.teacher(batch[0])).square().mean()
        if self.asks:
            self.log("value", loss.item())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow("on_train_batch_end")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.follow("on_before_zero_grad")

    @torch.no_grad()
    def follow(self, place: str) -> None:
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            if place == self.follows:
                mine.lerp_(other, 0.2)


class Turns(Net):
    """Two towers, of which every other batch trains one: the other one's gradients are None, and it doesn't decay."""

    def build(self) -> None:
        self.other = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        towers = self.net(batch[0]), self.other(batch[0])
        return F.cross_entropy(towers[batch_idx % 2], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-4, weight_decay=0.5)


class Marked(Net):
    """Attributes of parameters tell which of them decay."""

    def build(self) -> None:
        for layer in (self.net[0], self.net[4]):
            layer.weight.decay = 0.0

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "weight_decay": getattr(p, "decay", 5.0)} for p in self.parameters()]
        return torch.optim.AdamW(groups)


class Sometimes(Turns):
    """In some microbatches of some replicas, by their labels, the loss leaves the first layers out."""

    layers = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[: self.layers](batch[0])
        if batch[1].sum() % 2:
            hidden = hidden.detach()
        return F.cross_entropy(self.net[self.layers :](hidden), batch[1])


class Replacing(Net):
    """Replaces the memory of weights that its gradients pass through: a teacher's, or the last layer's."""

    whose = "own"

    def build(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.whose == "teacher":
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.data = mine.data.lerp(other.data, 0.3)
        else:
            self.net[4].weight.data = F.normalize(self.net[4].weight.data, dim=1)
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + self.teacher(out.repeat(1, 2).tanh()).square().mean()


class Measured(nn.Linear):
    def __init__(self, followed: bool) -> None:
        super().__init__(WIDTH, 8)
        self.size = MeanMetric(nan_strategy="disable" if followed else "warn")

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size.update(y.detach().norm(dim=1))
        return y


class MetricInside(Net):
    """The first layer has a metric of its own."""

    followed = True

    def build(self) -> None:
        self.net[0] = Measured(self.followed)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("size", self.net[0].size, on_step=False, on_epoch=True)
        return loss


class Leaving(Net):
    """Leaves on itself what depends on the number of updates, and what depends on samples alone."""

    wrong = ("best", "recent", "total", "each", "mean", "losses", "centre")

    def build(self) -> None:
        self.best, self.total, self.each, self.mean = MaxMetric(), SumMetric(), CatMetric(), MeanMetric()
        self.recent = RunningMean(window=3)
        self.accuracy, self.over_samples = MulticlassAccuracy(CLASSES), MeanMetric()
        self.losses: list[Tensor] = []
        self.predicted: dict[str, list[Tensor]] = {"of each sample": []}
        self.register_buffer("centre", torch.zeros(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        for metric in (self.best, self.recent, self.total, self.each, self.mean):
            metric.update(loss.detach())
        self.accuracy.update(logits, batch[1])
        self.over_samples.update(logits.detach().amax(1))
        self.losses.append(loss.detach())
        self.predicted["of each sample"].append(logits.argmax(1))
        self.centre.lerp_(logits.detach().mean(0), 0.1)
        return loss


class Smoothed(nn.Module):
    """Keeps running means of its own, or a count, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.count, self.cache = way, 0, 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.way == "in place":
            self.mean.lerp_(mean, 0.1)
        elif self.way == "assigned":
            self.mean = self.mean * 0.9 + mean * 0.1
        elif self.way == "by values" and mean.isfinite().all():
            self.mean.copy_(mean)
        elif self.way == "counts":
            self.count += 1
            return x / self.count
        self.cache = len(x)  # the same in each call
        return x - self.mean


class Advancing(Net):
    """Layers with a state, on both stages of two."""

    def build(self) -> None:
        ways = [Smoothed(way) for way in ("in place", "assigned", "by values", "counts", "none")]
        parts = [*self.net[:2], *ways, nn.BatchNorm1d(8, track_running_stats=False), spectral_norm(nn.Linear(8, 8))]
        self.net = nn.Sequential(*parts, nn.LayerNorm(8), nn.Linear(8, CLASSES))


class ChangesItself(nn.Linear):
    """A trained layer that changes its own weight."""

    def __init__(self, way: str) -> None:
        super().__init__(8, 8)
        self.way, self.is_due = way, way != "later"

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "to its signs":
                self.weight.copy_(self.weight.sign())
            elif self.way != "by samples" and self.is_due:
                self.weight.mul_(0.9)
            elif self.way == "by samples" and x[0, 0] > x[-1, 0]:
                self.weight[0] *= 0.5
        return super().forward(x)


class Changing(Net):
    """A layer changes its own weight, or the step does after the first batch."""

    way: str

    def build(self) -> None:
        if self.way != "in the step":
            self.net[2] = ChangesItself(self.way)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.way == "later":
            self.net[2].is_due = batch_idx == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.way == "in the step" and batch_idx == 1:
            with torch.no_grad():
                self.net[4].weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


WAYS = ("later", "by samples", "in the step", "to its signs")
BEFORE = "teacher, on_before_zero_grad"

KINDS: dict[str, Callable[[], Net]] = {
    "leaving": Leaving,
    "advancing": Advancing,
    "teacher": Teacher,
    BEFORE: partial(Teacher, follows="on_before_zero_grad"),
    "teacher that asks": partial(Teacher, follows="on_train_batch_end", asks=True),
    "turns": Turns,
    "marked": Marked,
    "sometimes the first": Sometimes,
    "sometimes the first four": partial(Sometimes, layers=4),
    "by frequency": ByFrequency,
    "metric": MetricInside,
    "metric that asks": partial(MetricInside, followed=False),
    "teacher's memory": partial(Replacing, whose="teacher"),
    "own memory": Replacing,
    **{way: partial(Changing, way=way) for way in WAYS},
}
MICROBATCHES_DIFFER = ("by samples", "sometimes")


def train(kind: str, strategy: str = "single", options: dict[str, Any] | None = None) -> Report:
    given = {"samples": 32, "max_epochs": 1} if kind.startswith(MICROBATCHES_DIFFER) else {"samples": 16}
    devices = {"devices": 2} if strategy == "data" else {}
    return fit(KINDS[kind], strategy, options or {}, batch=8, use_distributed_sampler=True, **given, **devices)


def run(launch: Any, kind: str, options: dict[str, Any]) -> list[Report]:
    """On all ranks of a pipeline."""
    ranks = options["stages"] * options.get("data_parallel", 1)
    reports: list[Report] = launch(train, ranks, kind, "sync", options)
    return reports


ONE_WITH_ONE_MICROBATCH = {"stages": 1, "microbatches": 1}
ZBV = TWO_STAGES | {"schedule": "zbv"}


@pytest.mark.parametrize(("kind", "options"), [
    ("teacher", ONE_STAGE), (BEFORE, TWO_STAGES), ("teacher that asks", TWO_STAGES),
    ("turns", TWO_STAGES), ("turns", ZBV),  # a gradient that is None on one stage is None on all
    # In the path of gradients: backwards of earlier microbatches still read the memory that is replaced.
    ("teacher's memory", ZBV | {"microbatches": 4}), ("own memory", TWO_STAGES | {"microbatches": 4}),
    ("metric", TWO_STAGES),
    ("advancing", ZBV | {"microbatches": 1}),  # in each chunk, a stage answers for the layers of the other
], ids=str)  # fmt: skip
def test_what_a_module_changes_or_leaves_out_is_as_in_one_process(
    launch: Any, kind: str, options: dict[str, Any]
) -> None:
    (expected,) = launch(train, 1, kind)
    reports = run(launch, kind, options)
    assert largest_difference(joined(reports, "weights"), expected.weights) < 1e-12
    if not kind.endswith("asks"):  # what microbatches logged by values isn't the batch's
        assert all(report.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-12) for report in reports)


FIRST, FIRST_FOUR = "sometimes the first", "sometimes the first four"
IN_PARTS = TWO_STAGES | {"data_parallel": 2, "data_parallel_kind": "fully_shard"}
ONE, REPLICATED = {"stages": 1, "schedule": "1f1b"}, {"data_parallel_kind": "replicate"}


@pytest.mark.parametrize(("kind", "options", "otherwise"), [
    # The factor of a batch's gradients comes with those of its last microbatch, which may leave stages out.
    (FIRST_FOUR, TWO_STAGES | {"stages": 3}, ONE), (FIRST, TWO_STAGES | {"schedule": "interleaved"}, ONE),
    (BEFORE, IN_PARTS | {"stages": 1}, REPLICATED),  # a mean teacher in parts may follow in a hook
    ("marked", IN_PARTS, REPLICATED),  # attributes of parameters are there for the optimizer
    # The last microbatch may not reach a layer that earlier ones did, or that it reaches on another replica.
    (FIRST, IN_PARTS, REPLICATED), ("turns", IN_PARTS | {"schedule": "interleaved"}, REPLICATED),
    *thorough(*((kind, IN_PARTS | {"schedule": "zbv"}, REPLICATED) for kind in (FIRST_FOUR, "turns"))),
], ids=str)  # fmt: skip
def test_stages_and_parts_train_as_others_with_the_same_microbatches(
    launch: Any, kind: str, options: dict[str, Any], otherwise: dict[str, Any]
) -> None:
    found, expected = (joined(run(launch, kind, each), "weights") for each in (options, options | otherwise))
    assert largest_difference(found, expected) < 1e-12


def test_attributes_of_parameters_are_there_in_fully_sharded_replicas(launch: Any) -> None:
    shards, whole = (launch(train, 2, "marked", strategy, {})[0] for strategy in ("fsdp", "ddp"))
    assert largest_difference(shards.weights, whole.weights) < 1e-12


@pytest.mark.parametrize(("kind", "strategy", "options", "error", "words"), [
    ("teacher", "sync", IN_PARTS | {"stages": 1}, "ValueError", ["changes 'teacher.", "fully_shard", "'replicate'"]),
    ("teacher", "sync", IN_PARTS | {"stages": 2}, "ValueError", ["'net.", "fully_shard", "'replicate'"]),
    ("teacher", "async", TWO_STAGES | {"stages": 1}, "ValueError", ["changes 'teacher.", "on_train_batch_end"]),
    ("teacher", "data", {}, "ValueError", ["parameter 'teacher.0.", "on_train_batch_end", "'ddp'"]),
    ("metric that asks", "sync", TWO_STAGES, "FlowError", ["'net.0.size'", "stage 0", "nan_strategy='disable'"]),
])  # fmt: skip
def test_what_no_stage_or_replica_can_change_alone_is_refused(
    refused: Any, kind: str, strategy: str, options: dict[str, Any], error: str, words: list[str]
) -> None:
    ranks = options.get("stages", 1) * options.get("data_parallel", 1)
    refused(words, train, ranks, kind, strategy, options, error=error)


@pytest.mark.parametrize(
    ("way", "schedule"), [*((way, "1f1b") for way in WAYS), ("by samples", "asynchronous"), ("in the step", "zbv")]
)
def test_a_trained_parameter_is_not_changed_once_a_microbatch(launch: Any, way: str, schedule: str) -> None:
    kind, options = ("async", {}) if schedule == "asynchronous" else ("sync", {"schedule": schedule})
    options |= {"microbatches": 2, "stages": 2}
    failures = launch(train, 2, way, kind, options, expect_errors=True)
    causes = [failure for failure in failures if isinstance(failure, str) and "PeerLostError" not in failure]
    name = f"'net.{4 if way == 'in the step' else 2}.weight'"
    assert causes and all(name in each or "modified by an inplace operation" in each for each in causes), failures
    if way == "to its signs":
        assert_refused(failures, "ValueError", [name])


ADVANCING = {"net.2", "net.3", "net.4", "net.5", "net.8.parametrizations.weight.0"}  # and BatchNorm


@pytest.mark.parametrize(("kind", "words", "names", "more"), [
    ("leaving", "is called for each microbatch", {*sorted(Leaving.wrong)[:5]}, "2 more"),
    ("advancing", "depends on how often it runs", ADVANCING, "1 more"),
    ("by frequency", "which samples run together", {"table"}, ""),
])  # fmt: skip
def test_what_differs_with_microbatches_is_warned_of_by_name(
    launch: Any, kind: str, words: str, names: set[str], more: str
) -> None:
    """What a step leaves once for each of them, layers whose state advances, and gradients that depend on the other
    samples: in one warning, with the fix. No text speaks of microbatches where there is one."""
    (text,) = run(launch, kind, TWO_STAGES)[0].warned_of(words)
    assert set(re.findall(r"'([^']*)'", text)) == names and more in text and "microbatches=1" in text, text
    assert not run(launch, kind, ONE_WITH_ONE_MICROBATCH)[0].warned_of("microbatch")
