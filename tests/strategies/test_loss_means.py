"""Losses that aren't means over samples have the numbers of a single process, or a warning says that they don't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.equality import assert_equal
from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import LENGTH, SAMPLES, TOKENS, Base

EXACT = 1e-10  # float64
FOUR: dict[str, Any] = {"microbatches": 4}
REPLICAS: dict[str, Any] = {"stages": 2, "data_parallel": 2, "microbatches": 2}
SHARES = {"batch_size": 4, "samples": 32}
IGNORED = -100


class Tokens(Base):
    """Of each sample another number of labels counts, and of some none."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, TOKENS)

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.blocks(self.embed(batch["input_ids"])))
        return self.loss_of(logits[:, :-1], batch["labels"][:, 1:])

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @classmethod
    def samples(cls) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        share = torch.linspace(0, 0.5, SAMPLES)[torch.randperm(SAMPLES, generator=generator)].unsqueeze(1)
        ignored = torch.rand(SAMPLES, LENGTH, generator=generator) >= share
        pairs = zip(super().samples(), ignored, strict=True)
        return [{**row, "labels": row["labels"].masked_fill(own, IGNORED)} for row, own in pairs]


class Selected(Tokens):
    """Only what counts is picked; the second loss by another choice."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        counts = labels != IGNORED
        return F.cross_entropy(logits[counts], labels[counts]) + logits.pow(2).mean(-1)[labels < 9].mean()


def labels_that_count(batch: Any) -> Tensor:
    """What the loss of `Tokens` averages over."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def test_replicas_average_their_means_as_under_ddp(launch: Any) -> None:
    reports = launch(train, 4, Tokens, "sync", REPLICAS, batch_size=4)
    reference = launch(train, 2, Tokens, "ddp", batch_size=4)[0]
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


# -- a weight of the user's own ---------------------------------------------------------------------------------------


def count_wrongly(batch: Any) -> Any:
    return "many"


def test_a_function_of_the_user_s_weighs_microbatches(launch: Any, single: Any, refused: Any) -> None:
    reports = launch(train, 2, Tokens, "sync", {**FOUR, "microbatch_weight": labels_that_count})
    assert_equal(reports, single(Tokens), EXACT)
    words = ["microbatch_weight returned 'many'"]
    refused(words, train, 2, Tokens, "sync", {**FOUR, "microbatch_weight": count_wrongly})


# -- warnings ----------------------------------------------------------------------------------------------------------


class OfRows(Base):
    """Linear layers for rows of six numbers."""

    layers = 4

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).square().mean()

    @classmethod
    def samples(cls) -> list[Any]:
        return [*torch.randn(16, 6, generator=torch.Generator().manual_seed(3))]


class Focal(OfRows):
    """The negatives are summed too, and only the positives counted: the last microbatch of the second batch has
    none. A trial doesn't come to it."""

    count, negative = 16, slice(-2, None)

    def loss(self, batch: Any) -> Tensor:
        positive = (batch[:, 0] > 0).to(batch).unsqueeze(1).expand(-1, 6)
        return F.binary_cross_entropy_with_logits(self.net(batch), positive, reduction="sum") / positive.sum()

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.ones(cls.count, 6)
        rows[cls.negative] = -1.0
        return [*rows]


# Of two replicas the second one's last microbatch has no positives.
FocalOfTheSecond = type("FocalOfTheSecond", (Focal,), {"count": 32, "negative": slice(29, None, 2)})
# Nothing counts in the second batch, whose loss is infinite in one process too.
FocalOfNone = type("FocalOfNone", (Focal,), {"negative": slice(8, None)})


class Centre(nn.Linear):
    """Subtracts the batch's mean, or each sample's own."""

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(super().forward(x), 0.1, self.training)
        return x - x.mean(self.dim, keepdim=True)


class Centred(OfRows):
    """A layer before the last stage mixes samples."""

    layers, dim = 8, 0

    def build(self) -> None:
        super().build()
        self.net[1] = Centre(6, 6)
        self.net[1].dim = self.dim


CentredByItself = type("CentredByItself", (Centred,), {"dim": 1})


class Normalised(OfRows):
    def build(self) -> None:
        super().build()
        self.net.insert(1, nn.BatchNorm1d(6))


class Noisy(OfRows):
    """Draws other numbers for two microbatches as one than for each of them."""

    layers = 8

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch + torch.from_numpy(np.random.randn(*batch.shape))).square().mean()


IN_A_V = {**FOUR, "schedule": "zbv"}
MIXED = "several samples"


# Model, strategy and its options, of `train`; what the warnings have in them, on which rank there is one, and words of
# it.
@pytest.mark.parametrize(("model", "strategy", "options", "given", "about", "rank", "words"), [
    (Selected, "sync", FOUR, {"limit_train_batches": 1}, "test_loss_means.py:", 0, ["microbatches=1"]),
    (Normalised, "sync", FOUR, {"limit_train_batches": 1}, "BatchNorm1d", 0, ["'net.1' is a", "microbatches=1"]),
    (Focal, "sync", FOUR, {}, "divided by 0", 0, ["test_loss_means.py:", "microbatches=1"]),
    (Centred, "sync", IN_A_V, {}, MIXED, 0, ["'net.1'", "microbatches=1"]),
    (Centred, "async", {}, {}, MIXED, 1, ["'net.1'", "microbatches=1"]),
    # A replica warns of what only its own microbatches have.
    (FocalOfTheSecond, "sync", REPLICAS, SHARES, "divided by 0", 1, []),
])  # fmt: skip
def test_what_can_t_be_a_mean_is_warned_of_once_by_name(
    launch: Any, model: Any, strategy: str, options: Any, given: Any, about: str, rank: int, words: list[str]
) -> None:
    ranks = 2 * options.get("data_parallel", 1)
    told = [report.warned_of(about) for report in launch(train, ranks, model, strategy, options, **given)]
    assert [len(texts) for texts in told] == [int(number == rank) for number in range(ranks)], told
    assert all(word in told[rank][0] for word in words), told


@pytest.mark.parametrize(("model", "options", "about"), [
    ("Blocks", FOUR, ["microbatch"]),
    (FocalOfNone, FOUR, ["divided by 0"]),  # where one process has no other loss
    (CentredByItself, IN_A_V, [MIXED]),
    (Noisy, IN_A_V, [MIXED, "put together"]),
])  # fmt: skip
def test_there_is_no_warning_of_what_is_right(
    launch: Any, model: Any, options: dict[str, Any], about: list[str]
) -> None:
    reports = launch(train, 2, model, "sync", options)
    assert [report.warned_of(*about) for report in reports] == [[], []]


# -- losses that can't be tried ----------------------------------------------------------------------------------------

STEPS: list[int] = []  # in this process: the steps by the end of each batch


class CountsSteps(CentredByItself):
    """Its last layers may be made for two samples."""

    most = 8

    def loss(self, batch: Any) -> Tensor:
        STEPS[-1] += 1
        if len(batch) > self.most:
            raise ValueError("two samples were expected")
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)

    @classmethod
    def samples(cls) -> list[Any]:
        return 6 * super().samples()


OfTwoSamples = type("OfTwoSamples", (CountsSteps,), {"most": 2})


def steps_of_batches(model: type[Base], batches: int) -> list[int]:
    STEPS[:] = [0]
    turn = LambdaCallback(on_train_batch_start=lambda *_: STEPS.append(0))
    train(model, "sync", FOUR, batch_size=8, samples=8 * batches, callbacks=[turn])
    return STEPS[1:]


def test_a_pair_is_tried_by_three_runs_of_the_step_and_not_for_ever_where_it_can_t_be(launch: Any) -> None:
    last_stage = launch(steps_of_batches, 2, CountsSteps, 5)[0]
    assert last_stage[1:5] == [4 + 3, 4 + 3, 4, 4 + 3], last_stage
    last_stage = launch(steps_of_batches, 2, OfTwoSamples, 12)[0]
    assert len(last_stage) == 12
    assert last_stage[7] == 4 and set(last_stage[9:]) == {4}, last_stage  # the ninth is tried by turn
