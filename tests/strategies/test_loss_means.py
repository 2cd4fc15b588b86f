"""Losses that aren't means over samples have the numbers of a single process, or a warning says that they don't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric

from tests.strategies.counted import COUNTED, labels_that_count
from tests.strategies.equality import assert_equal
from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import Base
from tests.strategies.reference import delayed
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

EXACT = 1e-10  # float64
FOUR: dict[str, Any] = {"microbatches": 4}
REPLICAS: dict[str, Any] = {"stages": 2, "data_parallel": 2, "microbatches": 2}
SHARES = {"batch_size": 4, "samples": 32}


def test_replicas_average_their_means_as_under_ddp(pool: WorkerPool) -> None:
    reports = pool.run(train, 4, "Tokens", "sync", REPLICAS, init=False, batch_size=4)
    reference = pool.run(train, 2, "Tokens", "ddp", init=False, batch_size=4)[0]
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


@pytest.mark.parametrize("options", [
    {"correction": None, "accumulate": 2}, {"schedule": "vhalf", "accumulate": 2}, *thorough({}, {"schedule": "vmin"}),
], ids=["accumulated", "accumulated in a V", "corrected", "in a V"])  # fmt: skip
def test_the_asynchronous_pipeline_equals_its_delayed_reference(pool: WorkerPool, options: dict[str, Any]) -> None:
    accumulate = options.get("accumulate", 1)
    given = {name: value for name, value in options.items() if name != "accumulate"}
    reports = pool.run(train, 2, "Tokens", "async", {**FOUR, **given}, init=False, accumulate_grad_batches=accumulate)
    reference = delayed(COUNTED["Tokens"], 2, 4, **options, weigh=lambda part: float(labels_that_count(part)))
    assert reports[0].losses == pytest.approx(reference.losses, rel=0, abs=EXACT)
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


# -- a weight of the user's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_function_of_the_user_s_weighs_microbatches(pool: WorkerPool, single: Any, strategy: str) -> None:
    options = {**FOUR, "microbatch_weight": labels_that_count}
    reports = pool.run(train, 2, "Tokens", strategy, options, init=False)
    if strategy == "sync":
        assert_equal(reports, single("Tokens"), EXACT)
    else:
        assert reports[0].losses[0] == pytest.approx(single("Tokens").losses[0], rel=0, abs=EXACT)


def count_wrongly(batch: Any) -> Any:
    return "many"


def test_a_weight_that_is_no_number_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    options = {**FOUR, "microbatch_weight": count_wrongly}
    failures = pool.run(train, 2, "Tokens", "sync", options, init=False, expect_errors=True)
    assert all("ValueError: microbatch_weight returned 'many'" in failure for failure in failures)


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


class FocalOfTheSecond(Focal):
    """Of two replicas the second one's last microbatch has no positives."""

    count, negative = 32, slice(29, None, 2)


class FocalOfNone(Focal):
    """Nothing counts in the second batch, whose loss is infinite in one process too."""

    negative = slice(8, None)


def of_positives(batch: Any) -> float:
    return float((batch[:, 0] > 0).sum())


class Highest(OfRows):
    """Keeps its highest loss, which is that of a microbatch. On the first replica all are the same."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        self.highest = MaxMetric()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.highest.update(loss.detach())
        return loss

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
        rows[::2] = 1.0
        return [*rows]


class Repeated(nn.Module):
    """Returns rows for each sample and head too, which are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.ones(1, 6).repeat(3 * len(x), 1)


class Headed(OfRows):
    layers = 6

    def build(self) -> None:
        self.first = Repeated()
        super().build()

    def loss(self, batch: Any) -> Tensor:
        hidden, heads = self.first(batch)
        return (self.net(hidden) * heads.view(len(batch), 3, 6).sum(1)).square().mean()


class Centre(nn.Module):
    """Subtracts the batch's mean, or each sample's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer(x), 0.1, self.training)
        return x - x.mean(self.dim, keepdim=True)


class Centred(OfRows):
    """A layer before the last stage mixes samples."""

    layers, dim = 8, 0

    def build(self) -> None:
        super().build()
        self.net[1] = Centre(self.dim)


class CentredByItself(Centred):
    dim = 1


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
WARNED: list[Any] = [
    ("Selected", "sync", FOUR, {"limit_train_batches": 1}, "counted.py:", 0, ["microbatches=1"]),
    (Normalised, "sync", FOUR, {"limit_train_batches": 1}, "BatchNorm1d", 0, ["'net.1' is a", "microbatches=1"]),
    (Focal, "sync", FOUR, {}, "divided by 0", 0, ["test_loss_means.py:", "microbatches=1"]),
    (Focal, "sync", {**FOUR, "microbatch_weight": of_positives}, {}, "divided by 0", 0, ["microbatches=1"]),
    (Centred, "sync", IN_A_V, {}, MIXED, 0, ["'net.1'", "microbatches=1"]),
    (Centred, "async", {}, {}, MIXED, 1, ["'net.1'", "microbatches=1"]),
    # A replica warns of what only its own microbatches have or leave.
    (FocalOfTheSecond, "sync", REPLICAS, SHARES, "divided by 0", 1, []),
    (Highest, "sync", REPLICAS, SHARES, "leaves other values in", 1, []),
    *thorough((Centred, "sync", FOUR, {}, MIXED, 1, ["'net.1'", "microbatches=1"])),
]


@pytest.mark.parametrize(("model", "strategy", "options", "given", "about", "rank", "words"), WARNED)
def test_what_can_t_be_a_mean_is_warned_of_once_by_name(
    pool: WorkerPool,
    model: Any,
    strategy: str,
    options: dict[str, Any],
    given: dict[str, Any],
    about: str,
    rank: int,
    words: list[str],
) -> None:
    ranks = 2 * options.get("data_parallel", 1)
    told = [report.warned_of(about) for report in pool.run(train, ranks, model, strategy, options, init=False, **given)]
    assert [len(texts) for texts in told] == [int(number == rank) for number in range(ranks)], told
    assert all(word in told[rank][0] for word in words), told
    if "microbatch_weight" in options:  # nobody is advised to give what is given
        assert "microbatch_weight" not in told[rank][0]


@pytest.mark.parametrize(
    ("model", "strategy", "options", "epochs", "about"),
    [
        ("Blocks", "sync", FOUR, 1, ["microbatch"]),
        (FocalOfNone, "sync", FOUR, 1, ["divided by 0"]),  # where one process has no other loss
        (Headed, "sync", FOUR, 4, [MIXED, "tried"]),  # equal rows for each sample's heads are no mixture
        (CentredByItself, "sync", IN_A_V, 1, [MIXED]),
        (Noisy, "sync", IN_A_V, 1, [MIXED, "put together"]),
        (CentredByItself, "async", {}, 1, [MIXED]),
        *thorough(("DemoTransformer", "sync", FOUR, 1, ["microbatch"])),
    ],
)
def test_there_is_no_warning_of_what_is_right(
    pool: WorkerPool, model: Any, strategy: str, options: dict[str, Any], epochs: int, about: list[str]
) -> None:
    reports = pool.run(train, 2, model, strategy, options, init=False, max_epochs=epochs)
    assert [report.warned_of(*about) for report in reports] == [[], []]


# -- losses that can't be tried ----------------------------------------------------------------------------------------

STEPS: list[int] = []  # in this process: the steps by the end of each batch


class CountsSteps(CentredByItself):
    def loss(self, batch: Any) -> Tensor:
        STEPS[-1] += 1
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)

    @classmethod
    def samples(cls) -> list[Any]:
        return 6 * super().samples()


class OfTwoSamples(CountsSteps):
    """Its last layers are made for two samples."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if len(batch) != 2:
            raise ValueError("two samples were expected")
        return loss


class Turn(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        STEPS.append(0)


def steps_of_batches(model: type[Base]) -> list[int]:
    STEPS[:] = [0]
    train(model, "sync", FOUR, batch_size=8, samples=96, callbacks=[Turn()])
    return STEPS[1:]


def test_what_can_t_be_tried_isn_t_tried_for_ever(pool: WorkerPool) -> None:
    last_stage = pool.run(steps_of_batches, 2, OfTwoSamples, init=False)[0]
    assert len(last_stage) == 12
    assert last_stage[7] == 4 and set(last_stage[9:]) == {4}, last_stage  # the ninth is tried by turn


def test_a_pair_is_tried_by_three_runs_of_the_step(pool: WorkerPool) -> None:
    last_stage = pool.run(steps_of_batches, 2, CountsSteps, init=False)[0]
    assert last_stage[1:5] == [4 + 3, 4 + 3, 4, 4 + 3], last_stage
