"""``recipes.check`` compares a layout with one process on a recipe's model and data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import check, record, train
from tests.recipes.runs import QUIET, done
from tests.recipes.test_configs import composed
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

DIGITS = ["model=mlp", "data=digits", "trainer.accelerator=cpu", *QUIET]


@pytest.mark.parametrize("layout", [
    ["strategy=pipeline_zbv"],
    *thorough(["strategy=pipeline_1f1b", "cluster.devices=4", "strategy.data_parallel=2", "strategy.stages=2"]),
])  # fmt: skip
def test_a_layout_is_equal_to_one_process(pool: WorkerPool, tmp_path: Path, layout: list[str]) -> None:
    words = [*DIGITS, *layout, "+command=check", "trainer.precision=64-true"]
    folder = done(pool, composed(*words, folder=tmp_path))
    assert record.read(folder)["status"] == "completed"
    assert 0 <= record.read_metrics(folder)["largest_difference"] < 1e-9  # type: ignore[operator]


@pytest.mark.parametrize(("words", "precision"), [([], "64-true"), (["trainer.precision=bf16-mixed"], "bf16-mixed")])
def test_the_command_line_is_that_of_train(monkeypatch: pytest.MonkeyPatch, words: list[str], precision: str) -> None:
    told: list[Any] = []
    monkeypatch.setattr(train, "main", lambda: told.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["check.py", "strategy=pipeline_zbv", *words])
    check.main()
    config = composed(*told[1:])
    assert (config["command"], config["trainer"]["precision"]) == ("check", precision)
    assert config["strategy"]["schedule"] == "zbv"
