"""A few of the faults of docs/faults.md, at least one for each phase. The others are thorough tests."""

from __future__ import annotations

import pytest

from tools.faults.faults import FAULTS
from tools.faults.training import PAIRS, case, case_of
from tools.workers.pool import WorkerPool

SAMPLE = [
    "activations are those of the microbatch before",
    "the factor of a batch isn't sent on",
    "gradients are clipped by the stage's norm",
    "a column layer doesn't sum the gradients of its input",
    "gradients aren't averaged over replicas",
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.thorough) for n in FAULTS])
def test_a_fault_is_found_and_placed(pool: WorkerPool, name: str) -> None:
    found = case_of(pool, name)
    assert found.is_right, found.report


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_without_a_fault_there_is_no_alarm(pool: WorkerPool, model: str, layout: str) -> None:
    found = case(pool, model, layout)
    assert found.is_right, found.report
