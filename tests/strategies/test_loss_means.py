"""Losses that aren't means over samples have the numbers of a single process, or a warning says that they don't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric

from tests.pool import WorkerPool
from tests.strategies.counted import COUNTED, labels_that_count
from tests.strategies.equality import assert_equal
from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import Base
from tests.strategies.reference import delayed
from tests.thorough import thorough
from tests.worker import texts_of_warnings

EXACT = 1e-10  # float64


def test_replicas_average_their_means_as_under_ddp(pool: WorkerPool) -> None:
    options = {"stages": 2, "data_parallel": 2, "microbatches": 2}
    reports = pool.run(train, 4, "Tokens", "sync", options, init=False, batch_size=4)
    reference = pool.run(train, 2, "Tokens", "ddp", init=False, batch_size=4)[0]
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


@pytest.mark.parametrize("options", [
    {"correction": None, "accumulate": 2}, {"schedule": "vhalf", "accumulate": 2}, *thorough({}, {"schedule": "vmin"}),
], ids=["accumulated", "accumulated in a V", "corrected", "in a V"])  # fmt: skip
def test_the_asynchronous_pipeline_equals_its_delayed_reference(pool: WorkerPool, options: dict[str, Any]) -> None:
    accumulate = options.get("accumulate", 1)
    given = {name: value for name, value in options.items() if name != "accumulate"}
    reports = pool.run(
        train, 2, "Tokens", "async", {"microbatches": 4, **given}, init=False, accumulate_grad_batches=accumulate
    )
    reference = delayed(COUNTED["Tokens"], 2, 4, **options, weigh=lambda part: float(labels_that_count(part)))
    assert reports[0].losses == pytest.approx(reference.losses, rel=0, abs=EXACT)
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


# -- a weight of the user's own ---------------------------------------------------------------------------------------


def count_wrongly(batch: Any) -> Any:
    return "many"


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_function_of_the_user_s_weighs_microbatches(pool: WorkerPool, single: Any, strategy: str) -> None:
    options = {"microbatches": 4, "microbatch_weight": labels_that_count}
    reports = pool.run(train, 2, "Tokens", strategy, options, init=False)
    if strategy == "sync":
        assert_equal(reports, single("Tokens"), EXACT)
    else:
        assert reports[0].losses[0] == pytest.approx(single("Tokens").losses[0], rel=0, abs=EXACT)


def test_a_weight_that_is_no_number_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    options = {"microbatches": 4, "microbatch_weight": count_wrongly}
    failures = pool.run(train, 2, "Tokens", "sync", options, init=False, expect_errors=True)
    assert all("ValueError: microbatch_weight returned 'many'" in failure for failure in failures)


# -- warnings ----------------------------------------------------------------------------------------------------------


def warned(model: str, batches: int | None = None, **options: Any) -> list[str]:
    with texts_of_warnings() as told:
        train(model, "sync", {"microbatches": 4, **options}, max_epochs=1, limit_train_batches=batches)
    return [text for text in told if "microbatch" in text]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Selected", "counted.py:"),
        ("Normalised", "'net.1' is a BatchNorm2d"),
    ],
)
def test_what_can_t_be_a_mean_is_warned_of_once_by_name(pool: WorkerPool, model: str, words: str) -> None:
    found = pool.run(warned, 2, model, 1, init=False)[0]
    assert words in found[0] and all("microbatches=1" in each for each in found), found


@pytest.mark.parametrize("model", ["Blocks", *thorough("DemoTransformer")])
def test_there_is_no_warning_of_what_is_right(pool: WorkerPool, model: str) -> None:
    assert pool.run(warned, 2, model, init=False)[0] == []


class Focal(Base):
    """The negatives are summed too, and only the positives counted: the last microbatch of the second batch has
    none. A trial doesn't come to it."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def loss(self, batch: Any) -> Tensor:
        positive = (batch[:, 0] > 0).to(batch).unsqueeze(1).expand(-1, 6)
        return F.binary_cross_entropy_with_logits(self.net(batch), positive, reduction="sum") / positive.sum()

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.ones(16, 6)
        rows[-2:] = -1.0
        return [*rows]


class FocalOfTheSecond(Focal):
    """Of two replicas the second one's last microbatch has no positives."""

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.ones(32, 6)
        rows[[29, 31]] = -1.0
        return [*rows]


class FocalOfNone(Focal):
    """Nothing counts in the second batch, whose loss is infinite in one process too."""

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.ones(16, 6)
        rows[8:] = -1.0
        return [*rows]


def warned_of_none() -> list[str]:
    with texts_of_warnings() as told:
        train(FocalOfNone, "sync", {"microbatches": 4}, max_epochs=1)
    return [text for text in told if "divided by 0" in text]


def of_positives(batch: Any) -> float:
    return float((batch[:, 0] > 0).sum())


def warned_though_weighed() -> list[str]:
    with texts_of_warnings() as told:
        train(Focal, "sync", {"microbatches": 4, "microbatch_weight": of_positives}, max_epochs=1)
    return [text for text in told if "divided by 0" in text]


def warned_of_focal(second: bool = False) -> list[str]:
    options = {"stages": 2, "data_parallel": 2, "microbatches": 2} if second else {"microbatches": 4}
    given = {"batch_size": 4, "samples": 32} if second else {}
    with texts_of_warnings() as told:
        train(FocalOfTheSecond if second else Focal, "sync", options, max_epochs=1, **given)
    return [text for text in told if "divided by 0" in text]


def test_a_sum_over_nothing_that_is_not_0_is_warned_of(pool: WorkerPool) -> None:
    (found,) = pool.run(warned_of_focal, 2, init=False)[0]
    assert "test_loss_means.py:" in found and "microbatches=1" in found


def test_it_is_not_where_one_process_has_no_other_loss(pool: WorkerPool) -> None:
    assert pool.run(warned_of_none, 2, init=False) == [[], []]


def test_nobody_is_advised_to_give_what_is_given(pool: WorkerPool) -> None:
    (found,) = pool.run(warned_though_weighed, 2, init=False)[0]
    assert "microbatches=1" in found and "microbatch_weight" not in found


class Highest(Base):
    """Keeps its highest loss, which is that of a microbatch. On the first replica all are the same."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        self.highest = MaxMetric()

    def loss(self, batch: Any) -> Tensor:
        loss = self.net(batch).square().mean()
        self.highest.update(loss.detach())
        return loss

    @classmethod
    def samples(cls) -> list[Any]:
        rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
        rows[::2] = 1.0
        return [*rows]


def warned_of_highest() -> list[str]:
    with texts_of_warnings() as told:
        options = {"stages": 2, "data_parallel": 2, "microbatches": 2}
        train(Highest, "sync", options, max_epochs=1, batch_size=4, samples=32)
    return [text for text in told if "leaves other values in" in text]


def test_a_replica_warns_of_what_only_its_microbatches_leave(pool: WorkerPool) -> None:
    found = pool.run(warned_of_highest, 4, init=False)
    assert [len(texts) for texts in found] == [0, 1, 0, 0], found


class Repeated(nn.Module):
    """Returns rows for each sample and head too, which are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.ones(1, 6).repeat(3 * len(x), 1)


class Headed(Base):
    def build(self) -> None:
        self.first = Repeated()
        self.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))

    def loss(self, batch: Any) -> Tensor:
        hidden, heads = self.first(batch)
        return (self.net(hidden) * heads.view(len(batch), 3, 6).sum(1)).square().mean()

    @classmethod
    def samples(cls) -> list[Any]:
        return Centred.samples()


def warned_of_headed() -> list[str]:
    with texts_of_warnings() as told:
        train(Headed, "sync", {"microbatches": 4}, max_epochs=4)
    return [text for text in told if "several samples" in text or "tried" in text]


def test_equal_rows_for_each_sample_s_heads_are_no_mixture(pool: WorkerPool) -> None:
    assert pool.run(warned_of_headed, 2, init=False) == [[], []]


def test_a_replica_warns_of_what_only_its_microbatches_have(pool: WorkerPool) -> None:
    found = pool.run(warned_of_focal, 4, True, init=False)
    assert [len(texts) for texts in found] == [0, 1, 0, 0], found


# -- layers before the last stage that mix samples ---------------------------------------------------------------------


class Centre(nn.Module):
    """Subtracts the batch's mean, or each sample's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer(x), 0.1, self.training)
        return x - x.mean(self.dim, keepdim=True)


class Centred(Base):
    dim = 0

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 6), Centre(self.dim), *(nn.Linear(6, 6) for _ in range(6)))

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).square().mean()

    @classmethod
    def samples(cls) -> list[Any]:
        return [*torch.randn(16, 6, generator=torch.Generator().manual_seed(3))]


class CentredByItself(Centred):
    dim = 1


MIXING = {kind.__name__: kind for kind in (Centred, CentredByItself)}


def warned_of_mixing(model: str, strategy: str, options: dict[str, Any]) -> list[str]:
    with texts_of_warnings() as told:
        train(MIXING[model], strategy, options, max_epochs=1)
    return [text for text in told if "several samples" in text]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("sync", {"microbatches": 4, "schedule": "zbv"}), ("async", {}), *thorough(("sync", {"microbatches": 4}))],
)
def test_layers_that_mix_samples_are_warned_of(pool: WorkerPool, strategy: str, options: dict[str, Any]) -> None:
    found = pool.run(warned_of_mixing, 2, "Centred", strategy, options, init=False)
    assert sum("'net.1'" in text and "microbatches=1" in text for texts in found for text in texts) == 1, found
    assert pool.run(warned_of_mixing, 2, "CentredByItself", strategy, options, init=False) == [[], []]


# -- losses that can't be tried ----------------------------------------------------------------------------------------

STEPS: list[int] = []  # in this process: the steps by the end of each batch


class OfTwoSamples(Centred):
    """Its last layers are made for two samples."""

    def loss(self, batch: Any) -> Tensor:
        STEPS[-1] += 1
        hidden = self.net(batch)
        if len(hidden) != 2:
            raise ValueError("two samples were expected")
        return hidden.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)

    @classmethod
    def samples(cls) -> list[Any]:
        return 6 * super().samples()


class Turn(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        STEPS.append(0)


def steps_of_batches() -> list[int]:
    STEPS[:] = [0]
    train(OfTwoSamples, "sync", {"microbatches": 4}, batch_size=8, samples=96, callbacks=[Turn()])
    return STEPS[1:]


def test_what_can_t_be_tried_isn_t_tried_for_ever(pool: WorkerPool) -> None:
    last_stage = pool.run(steps_of_batches, 2, init=False)[0]
    assert len(last_stage) == 12
    assert last_stage[7] == 4 and set(last_stage[9:]) == {4}, last_stage  # the ninth is tried by turn
