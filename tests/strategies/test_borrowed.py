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
