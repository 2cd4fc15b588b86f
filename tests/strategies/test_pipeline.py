"""Synchronous pipelines have the numbers of a single process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import WorkerPool
from tests.strategies.harness import Report, joined, largest_difference, train
from tests.strategies.models import MODELS

EXACT = 1e-12  # float64


def assert_equal(reports: list[Report], reference: Report, tolerance: float = EXACT) -> None:
    for report in reports:
        assert report.losses == pytest.approx(reference.losses, rel=0, abs=tolerance)
        assert report.metrics.keys() == reference.metrics.keys()
        assert report.metrics == pytest.approx(reference.metrics, rel=0, abs=tolerance)
        assert report.validation == [pytest.approx(reference.validation[0], rel=0, abs=tolerance)]
        assert len(report.gradients) == len(reference.gradients)
    for update in range(len(reference.gradients)):
        found = joined(reports, "gradients", update)
        assert largest_difference(found, reference.gradients[update]) < tolerance, f"update {update}"
    assert largest_difference(joined(reports, "weights"), reference.weights) < tolerance


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("model", list(MODELS))
def test_unmodified_models_train_as_in_one_process(pool: WorkerPool, single: Any, model: str, stages: int) -> None:
    schedule = {2: "gpipe", 3: "1f1b", 4: "gpipe"}[stages]
    reports = pool.run(train, stages, model, "sync", {"schedule": schedule, "microbatches": 4}, init=False)
    assert_equal(reports, single(model))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("trainer_options", [
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "shuffle": True},
], ids=["accumulation", "clip-norm", "clip-value", "all-shuffled"])  # fmt: skip
def test_accumulation_and_clipping_as_in_one_process(
    pool: WorkerPool, single: Any, schedule: str, trainer_options: dict[str, Any]
) -> None:
    reports = pool.run(train, 3, "Blocks", "sync", {"schedule": schedule}, init=False, **trainer_options)
    assert_equal(reports, single("Blocks", **trainer_options))


@pytest.mark.parametrize("model", ["Llama", "ShardableGPT2", "Blocks", "LeNet"])
def test_activation_checkpointing_changes_no_number(pool: WorkerPool, single: Any, model: str) -> None:
    options = {"microbatches": 4, "activation_checkpointing": True}
    reports = pool.run(train, 3, model, "sync", options, init=False)
    assert_equal(reports, single(model))


def test_tied_weights_count_once_in_the_norm(pool: WorkerPool, single: Any) -> None:
    reports = pool.run(train, 3, "GPT2", "sync", {"microbatches": 2}, init=False, gradient_clip_val=0.05)
    assert_equal(reports, single("GPT2", gradient_clip_val=0.05))
