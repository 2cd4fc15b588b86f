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


def run(pool: WorkerPool, strategy: str, ranks: int, model: str, options: dict[str, Any], **given: Any) -> list[Report]:
    return pool.run(fit, ranks, model, strategy, options, init=False, **given)


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), [
    ("Accumulating", "tensor", 4, {"tensor_parallel": 2, "data_parallel": 2}), ("Accumulating", "fsdp", 2, {}),
    ("SharedGraph", "tensor", 2, {}), ("SharedGraph", "fsdp", 2, {"reshard_after_forward": False}),
    # Where the network of a gradient penalty is whole.
    ("GradientPenalty", "tensor", 2, {"tensor_parallel": 1, "data_parallel": 2}),
    ("GradientPenalty", "fsdp", 2, {"units": ["generator"]}),
])  # fmt: skip
def test_manual_optimization_trains_as_in_one_process(
    pool: WorkerPool, model: str, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    [whole] = pool.run(fit, 1, model, init=False)
    reports = run(pool, strategy, ranks, model, options)
    # Each replica's losses are those of its share.
    losses = torch.tensor([report.losses for report in reports], dtype=torch.float64).mean(0)
    assert losses.tolist() == pytest.approx(whole.losses, rel=0, abs=EXACT)
    assert largest_difference(joined(reports, "weights"), whole.weights) < EXACT


@pytest.mark.parametrize(("model", "strategy", "options", "words"), [
    ("GradientPenalty", "tensor", {}, ["second derivative", "create_graph=True"]),  # its network is divided
    ("GradientPenalty", "fsdp", {}, ["second derivative", "`units`"]),
    # A backward past the strategy.
    ("Direct", "tensor", {}, ["self.manual_backward"]),
    ("Direct", "fsdp", {"units": ["discriminator"]}, ["self.manual_backward"]),
])  # fmt: skip
def test_backwards_that_cannot_be_followed_are_refused(
    pool: WorkerPool, model: str, strategy: str, options: dict[str, Any], words: list[str]
) -> None:
    assert_refused(run(pool, strategy, 2, model, options, expect_errors=True), "RuntimeError", words)
