"""An evaluation may read parameters and buffers of other stages: the numbers of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pool import WorkerPool
from tests.strategies.equality import assert_equal
from tests.strategies.failures import assert_refused
from tests.strategies.harness import joined, largest_difference, make_trainer, train
from tests.strategies.models import TOKENS, Base


class Sampled(Base):
    """Trained on a few items, and validated by ranking all of them. What the first layer is scaled by is undone."""

    def build(self) -> None:
        self.items = nn.Embedding(TOKENS, 8)
        self.first = nn.Linear(8, 8)
        self.first.register_buffer("scale", torch.rand(8) + 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.first(self.items(ids)).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        scores = (self.hidden(ids[:, 3:])[:, None] * self.items(ids[:, :3])).sum(-1)
        return F.cross_entropy(scores, torch.zeros_like(ids[:, 0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = batch["input_ids"]
        scores = F.linear(self.hidden(ids[:, 1:]) / self.first.scale, self.items.weight)
        self.log("val_loss", F.cross_entropy(scores, ids[:, 0]))


class Ranked(Sampled):
    """Trained on all items, too. It logs its learning rate before its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", self.optimizers().param_groups[0]["lr"] * len(self.lr_schedulers().get_last_lr()))  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(F.linear(self.hidden(ids[:, 1:]), self.items.weight), ids[:, 0])


@pytest.mark.parametrize(("model", "stages", "schedule"), [
    (Sampled, 2, "1f1b"), (Sampled, 3, "1f1b"), (Sampled, 2, "interleaved"), (Ranked, 2, "1f1b"),
])  # fmt: skip
def test_an_evaluation_reads_the_present_values_of_other_stages(
    pool: WorkerPool, single: Any, model: type[Base], stages: int, schedule: str
) -> None:
    """In the sanity check, after each epoch, and after the fit."""
    given: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1}
    options = {"schedule": schedule, "microbatches": 2}
    reports = pool.run(train, stages, model, "sync", options, init=False, **given)
    assert_equal(reports, single(model, **given))


class Hooked(Sampled):
    """Its weights change between the batches of an evaluation."""

    def on_validation_batch_start(self, *args: Any) -> None:
        self.first.scale.mul_(1.25)
        self.items.weight.data.mul_(1.1)


class TwoReaders(Sampled):
    """Each loader's step reads the same buffer at another place."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        ids = batch["input_ids"]
        if dataloader_idx == 1:
            return super().validation_step(batch, batch_idx)
        x = self.first(self.items(ids[:, 1:])).mean(1)
        for block in self.blocks[:2]:
            x = x + block(x)
        x = x / self.first.scale  # before the next layers
        for block in self.blocks[2:]:
            x = x + block(x)
        self.log("val_loss", x.square().mean())


def validated(kind: type[Base], strategy: str, options: dict[str, Any], loaders: int) -> Any:
    torch.set_default_dtype(torch.float64)
    return make_trainer(strategy, [], options).validate(kind(), [kind.loader() for _ in range(loaders)], verbose=False)


@pytest.mark.parametrize(("model", "stages", "loaders"), [(Hooked, 2, 1), (TwoReaders, 3, 2)])
def test_values_are_those_of_the_batch_and_of_the_loader(
    pool: WorkerPool, model: type[Base], stages: int, loaders: int
) -> None:
    (alone,) = pool.run(validated, 1, model, "single", {}, loaders, init=False)
    for found in pool.run(validated, stages, model, "sync", {"microbatches": 1}, loaders, init=False):
        assert found == [pytest.approx(each, rel=0, abs=1e-12) for each in alone]


class ChangesInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.scale += 0.5
        return super().forward(x)


class Changing(Sampled):
    def build(self) -> None:
        super().build()
        scale, self.first = self.first.scale, ChangesInForward(8, 8)
        self.first.register_buffer("scale", scale)


def fit_changing() -> None:
    make_trainer("sync", [], {"microbatches": 1}).fit(Changing(), Changing.loader(), Changing.loader())


def test_what_an_evaluation_changes_is_not_lent(pool: WorkerPool) -> None:
    failures = pool.run(fit_changing, 2, init=False, expect_errors=True)
    assert_refused(failures, "FlowError", ["'first.scale'", "its layer changes"])


def fit_shards() -> None:
    options = {"stages": 2, "tensor_parallel": 2, "microbatches": 2, "plan": {"items": "embedding"}}
    make_trainer("sync", [], options).fit(Sampled(), Sampled.loader(), Sampled.loader())


def test_what_tensor_ranks_hold_in_parts_is_not_lent(pool: WorkerPool) -> None:
    failures = pool.run(fit_shards, 4, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["validation_step reads 'items.weight'", "tensor rank"])


def test_where_stages_do_not_wait_for_each_other_they_do_before_an_evaluation(pool: WorkerPool) -> None:
    reports = pool.run(train, 2, Sampled, "async", {"microbatches": 2}, init=False)
    alone = pool.run(evaluated, 1, joined(reports, "weights"), init=False)[0]
    assert all(report.validation == [pytest.approx(alone, rel=0, abs=1e-12)] for report in reports)
    assert largest_difference(joined(reports, "weights"), dict(Sampled().named_parameters())) > 0.01


def evaluated(weights: dict[str, Tensor]) -> Any:
    torch.set_default_dtype(torch.float64)
    module = Sampled()
    module.load_state_dict(weights, strict=False)
    return make_trainer("single", [], {}).validate(module, Sampled.loader(), verbose=False)[0]


def fit_in_parts() -> None:
    options = {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard", "microbatches": 2}
    make_trainer("sync", [], options).fit(Sampled(), Sampled.loader(batch_size=4), Sampled.loader(batch_size=4))


def test_what_replicas_hold_in_parts_is_not_lent(pool: WorkerPool) -> None:
    failures = pool.run(fit_in_parts, 4, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["validation_step reads", "fully_shard", "'replicate'"])
