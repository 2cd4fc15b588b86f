"""Asynchronous pipelines have the numbers of delayed gradients, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.pipeline.schedule import version
from lightning_parallel.pipeline.weights import WeightVersions
from tests.pool import WorkerPool
from tests.strategies.harness import Report, joined, largest_difference, train
from tests.strategies.reference import delayed

EXACT = 1e-12  # float64


def updates_of(reports: list[Report], number: int) -> dict[str, torch.Tensor]:
    """Gradients of an update, each stage's own, though the stages step at different times."""
    return joined(reports, "gradients", number)


def train_and_log_versions(model: str, options: dict[str, Any], **trainer_options: Any) -> tuple[Report, list[int]]:
    """As `train`, with the version of the weights that each microbatch's forward used."""
    used: list[int] = []
    forward = WeightVersions.forward

    def logging(self: WeightVersions, step: Any) -> Any:
        used.append(self.updates)
        return forward(self, step)

    WeightVersions.forward = logging  # type: ignore[method-assign]
    try:
        return train(model, "async", options, **trainer_options), used
    finally:
        WeightVersions.forward = forward  # type: ignore[method-assign]


CASES = [
    ("LeNet", 2, 1, 0, {}),
    ("LeNet", 3, 2, 0, {}),
    ("GPT2Untied", 2, 1, 0, {}),
    ("GPT2Untied", 4, 1, 0, {}),
    ("Llama", 3, 1, 1, {}),
    ("DemoTransformer", 3, 1, 0, {}),
    ("DemoTransformer", 4, 2, 0, {}),
    ("LeNet", 3, 1, 0, {"accumulate_grad_batches": 2}),
    ("Llama", 3, 3, 0, {"gradient_clip_val": 0.05}),
    ("LeNet", 4, 1, 1, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
]


@pytest.mark.parametrize(("model", "stages", "microbatches", "extra", "trainer_options"), CASES)
def test_training_equals_delayed_gradients(
    pool: WorkerPool, model: str, stages: int, microbatches: int, extra: int, trainer_options: dict[str, Any]
) -> None:
    options = {"microbatches": microbatches, "extra_in_flight": extra}
    reports = pool.run(train, stages, model, "async", options, init=False, max_epochs=3, **trainer_options)
    reference = pool.run(
        delayed, 1, model, stages, microbatches, init=False, extra_in_flight=extra, epochs=3,
        accumulate=trainer_options.get("accumulate_grad_batches", 1), clip=trainer_options.get("gradient_clip_val"),
    )[0]  # fmt: skip
    assert reports[0].losses == pytest.approx(reference.losses, rel=0, abs=EXACT)
    for number, expected in enumerate(reference.gradients):
        assert largest_difference(updates_of(reports, number), expected) < EXACT, f"update {number}"
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


@pytest.mark.parametrize("model", ["Llama", "DemoTransformer"])
def test_recomputation_uses_the_weights_of_its_forward(pool: WorkerPool, model: str) -> None:
    options = {"microbatches": 1, "activation_checkpointing": True}
    reports = pool.run(train, 3, model, "async", options, init=False)
    reference = pool.run(delayed, 1, model, 3, 1, init=False)[0]
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


@pytest.mark.parametrize(("stages", "microbatches", "extra"), [(3, 1, 0), (3, 2, 0), (2, 1, 1), (4, 4, 0)])
def test_every_forward_uses_the_version_of_the_formula(
    pool: WorkerPool, stages: int, microbatches: int, extra: int
) -> None:
    options = {"microbatches": microbatches, "extra_in_flight": extra}
    runs = pool.run(train_and_log_versions, stages, "LeNet", options, init=False, max_epochs=1)
    for rank, (_, used) in enumerate(runs):
        stage = stages - 1 - rank
        expected = [version(stages, stage, microbatches, k, extra) for k in range(3 * microbatches)]
        assert used == expected, f"stage {stage}"


def test_one_stage_is_the_plain_loop_to_the_bit(pool: WorkerPool) -> None:
    plain = pool.run(train, 1, "Blocks", init=False)[0]
    staged = pool.run(train, 1, "Blocks", "async", {"microbatches": 1}, init=False)[0]
    assert staged.losses == plain.losses
    assert largest_difference(staged.weights, plain.weights) == 0


def test_latest_weights_train_otherwise_than_stashed_ones(pool: WorkerPool) -> None:
    stash, latest = (
        joined(pool.run(train, 3, "LeNet", "async", {"weights": weights}, init=False, max_epochs=3), "weights")
        for weights in ("stash", "latest")
    )
    assert largest_difference(stash, latest) > 1e-6
    assert all(torch.isfinite(w).all() for w in latest.values())


def test_all_ranks_report_the_last_stage_s_metrics(pool: WorkerPool) -> None:
    reports = pool.run(train, 3, "LeNet", "async", {"microbatches": 2}, init=False)
    for report in reports[1:]:
        assert report.metrics == reports[0].metrics
        assert report.validation == reports[0].validation
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= reports[0].metrics.keys()


def test_loose_parameters_are_trained_where_they_are_used(pool: WorkerPool) -> None:
    reports = pool.run(train, 3, "Blocks", "async", {"microbatches": 2}, init=False)
    reference = pool.run(delayed, 1, "Blocks", 3, 2, init=False)[0]
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT
