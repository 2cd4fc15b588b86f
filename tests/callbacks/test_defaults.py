"""callbacks/defaults.py: Lightning's callbacks have one process's numbers, or are refused by name before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as of_lightning

from tests.strategies.failures import assert_refused
from tests.strategies.harness import ALL, Report, complete, here, joined, largest_difference, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


class Unfreezes(of_lightning.BaseFinetuning):
    """The last layer, from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.lm_head)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.lm_head, optimizer, 0.01)


class ThenClips(of_lightning.LearningRateFinder):
    """By hand, in the run after the search."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.05)


MAKE: dict[str, Any] = {
    "Unfreezes": Unfreezes,
    "StochasticWeightAveraging": lambda: of_lightning.StochasticWeightAveraging(0.05, swa_epoch_start=1),
    "ModelPruning": lambda: of_lightning.ModelPruning(
        "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False
    ),
    "BatchSizeFinder": lambda: of_lightning.BatchSizeFinder(max_trials=2),
    "LearningRateFinder": lambda: of_lightning.LearningRateFinder(min_lr=1e-4, num_training_steps=16),
    "ThenClips": lambda: ThenClips(num_training_steps=4),
}


class Learned(ALL["ShardableLlama"]):  # type: ignore[misc]
    """With a learning rate to be found, and a batch size."""

    lr, batch_size = 1e-2, 8

    def train_dataloader(self) -> Any:
        replicas = getattr(self.trainer.strategy, "is_distributed", False)
        share = self.trainer.distributed_sampler_kwargs if replicas else None
        return self.loader(False, self.batch_size, 16, share)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def fit(callback: str, strategy: str, options: dict[str, Any] | None = None, **given: Any) -> tuple[Report, float]:
    torch.set_default_dtype(torch.float64)
    module, report = Learned(), Report()
    callbacks: list[of_lightning.Callback] = [MAKE[callback]()]
    options = options or {}
    module.batch_size //= options.get("data_parallel", 1)
    given |= {"max_epochs": -1, "max_steps": 2} if callback == "LearningRateFinder" else {"max_epochs": 3}
    trainer = make_trainer(strategy, callbacks, options, **given)
    trainer.fit(module)
    report.weights = {name: complete(p.detach()) for name, p in here(module).items()}
    report.shards = trainer.strategy.local_model.shards if strategy not in ("single", "data") else {}  # type: ignore[attr-defined]
    return report, module.lr


@pytest.mark.parametrize(("callback", "strategy"), [
    ("ModelPruning", "sync"), ("ModelPruning", "tensor"), ("ModelPruning", "fsdp"), ("Unfreezes", "async"),
    ("BatchSizeFinder", "tensor"),  # with replicas, Lightning refuses it
    ("StochasticWeightAveraging", "async"), ("LearningRateFinder", "async"),
])  # fmt: skip
def test_what_works_on_the_whole_model_is_refused_on_all_ranks(pool: WorkerPool, callback: str, strategy: str) -> None:
    failures = pool.run(fit, 2, callback, strategy, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", [callback, "Strategy"])


WHOLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "replicas": ("sync", 2, {"stages": 1, "data_parallel": 2}),
    "sync alone": ("sync", 1, {}),
    "tensor alone": ("tensor", 1, {}),
}


def test_gradients_are_watched_in_the_run_after_a_search(pool: WorkerPool) -> None:
    failures = pool.run(fit, 2, "ThenClips", "sync", init=False, expect_errors=True)
    assert_refused(failures, "RuntimeError", ["changes gradients", "self.clip_gradients"])


@pytest.mark.parametrize(("callback", "strategy"), [
    ("Unfreezes", "tensor"), ("LearningRateFinder", "sync"), ("StochasticWeightAveraging", "data"),
    ("Unfreezes", "replicas"), ("ModelPruning", "replicas"), ("ModelPruning", "sync alone"),
    *thorough(
        ("LearningRateFinder", "tensor"), ("LearningRateFinder", "data"),
        *(("StochasticWeightAveraging", whole) for whole in WHOLE), ("ModelPruning", "tensor alone"),
    ),
])  # fmt: skip
def test_what_works_has_the_numbers_of_one_process(pool: WorkerPool, callback: str, strategy: str) -> None:
    """Where each rank holds the whole model, all callbacks do."""
    [(whole, rate)] = pool.run(fit, 1, callback, "single", init=False)
    name, ranks, options = WHOLE.get(strategy, (strategy, 1 if strategy == "data" else 2, {}))
    given = {"devices": 2} if strategy == "data" else {}
    results = pool.run(fit, ranks, callback, name, options, init=False, **given)
    assert (rate != Learned.lr) == (callback == "LearningRateFinder")
    assert [found for _, found in results] == [rate] * ranks
    assert largest_difference(joined([report for report, _ in results], "weights"), whole.weights) < 1e-10


def test_replicas_find_one_learning_rate(pool: WorkerPool) -> None:
    (_, rate), (_, other) = pool.run(fit, 2, "LearningRateFinder", "fsdp", init=False)
    assert rate == other != Learned.lr
