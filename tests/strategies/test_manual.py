"""Modules with manual optimization have the numbers of one process. Two that take turns are in the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.failures import assert_refused
from tests.strategies.harness import Report, joined, largest_difference
from tests.strategies.manual import fit
from tools.workers.pool import WorkerPool

EXACT = 1e-12  # float64
BOTH_AXES = {"tensor_parallel": 2, "data_parallel": 2}


def run(pool: WorkerPool, strategy: str, ranks: int, model: str, options: dict[str, Any], **given: Any) -> list[Report]:
    return pool.run(fit, ranks, model, strategy, options, init=False, **given)


def assert_equal(reports: list[Report], whole: Report) -> None:
    # Each replica's losses are those of its share.
    losses = torch.tensor([report.losses for report in reports], dtype=torch.float64).mean(0)
    assert losses.tolist() == pytest.approx(whole.losses, rel=0, abs=EXACT)
    assert largest_difference(joined(reports, "weights"), whole.weights) < EXACT


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), [
    ("Accumulating", "tensor", 4, BOTH_AXES), ("Accumulating", "fsdp", 2, {}),
    ("SharedGraph", "tensor", 2, {}), ("SharedGraph", "fsdp", 2, {"reshard_after_forward": False}),
    ("Wholes", "tensor", 2, {}),
    ("Wholes", "fsdp", 2, {"reshard_after_forward": False}),
])  # fmt: skip
def test_manual_optimization_trains_as_in_one_process(
    pool: WorkerPool, model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    [whole] = pool.run(fit, 1, model, init=False)
    assert_equal(run(pool, strategy, ranks, model, options), whole)


@pytest.mark.parametrize(("strategy", "ranks", "options"), [
    ("tensor", 2, {"tensor_parallel": 1, "data_parallel": 2}), ("fsdp", 2, {"units": ["generator"]}),
])  # fmt: skip
def test_a_gradient_penalty_is_that_of_one_process_where_its_network_is_whole(
    pool: WorkerPool, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    [whole] = pool.run(fit, 1, "GradientPenalty", init=False)
    assert_equal(run(pool, strategy, ranks, "GradientPenalty", options), whole)


@pytest.mark.parametrize(("strategy", "fix"), [("tensor", "create_graph=True"), ("fsdp", "`units`")])
def test_a_gradient_penalty_is_refused_where_its_network_is_divided(pool: WorkerPool, strategy: str, fix: str) -> None:
    failures = run(pool, strategy, 2, "GradientPenalty", {}, expect_errors=True)
    assert_refused(failures, "RuntimeError", ["second derivative", fix])


@pytest.mark.parametrize(("strategy", "options"), [("tensor", {}), ("fsdp", {"units": ["discriminator"]})])
def test_a_backward_past_the_strategy_is_refused(pool: WorkerPool, strategy: str, options: dict[str, Any]) -> None:
    failures = pool.run(fit, 2, "Direct", strategy, options, init=False, expect_errors=True)
    assert_refused(failures, "RuntimeError", ["self.manual_backward"])
