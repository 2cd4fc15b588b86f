"""What the tests of strategies compare with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tools.workers.torchvision_ops  # noqa: F401  before Lightning
from tests.strategies.failures import LIMIT, assert_refused
from tests.strategies.harness import Report, train
from tools.workers.pool import WorkerPool


def in_double(function: Any, *args: Any, **given: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return function(*args, **given)


@pytest.fixture(scope="session")
def launch(pool: WorkerPool) -> Any:
    """``launch(function, ranks, ...)``: what each rank returns of a call that starts a Trainer itself, in float64."""
    return lambda function, ranks, *args, **given: pool.run(in_double, ranks, function, *args, init=False, **given)


@pytest.fixture(scope="session")
def single(pool: WorkerPool) -> Any:
    """``single(model, **options)``: the report of `train` in one process, with Lightning alone. Each made once."""
    runs: dict[Any, Report] = {}

    def get(model: Any, **options: Any) -> Report:
        key = (model, *sorted(options.items()))
        if key not in runs:
            runs[key] = pool.run(train, 1, model, init=False, **options)[0]
        return runs[key]

    return get


@pytest.fixture
def refused(launch: Any) -> Any:
    """``refused(words, function, ranks, ...)``: a call of the pool fails on each rank, by an ``error`` whose message
    has these words."""

    def check(words: list[str], function: Any, ranks: int, *args: Any, error: str = "ValueError", **given: Any) -> None:
        failures = launch(function, ranks, *args, expect_errors=True, timeout=LIMIT, **given)
        assert_refused(failures, error, words)

    return check
