"""``recipes.check`` compares a layout with one process. ``recipes.plan`` says which layouts fit, and ``strategy=auto``
takes the best of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes import check, plan, record, train
from tests.recipes.runs import QUIET, composed, done, problems
from tests.thorough import thorough
from tools.workers.pool import WorkerPool
from tools.workers.worker import ROOT

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


@pytest.mark.parametrize(("command", "words", "said"), [
    (check, [], {"command": "check", "precision": "64-true", "schedule": "zbv"}),
    (check, ["trainer.precision=bf16-mixed"], {"command": "check", "precision": "bf16-mixed", "schedule": "zbv"}),
    (plan, ["strategy.microbatches=4", "plan.devices=8"],
     {"command": "plan", "precision": "32-true", "schedule": None, "devices": 8}),
])  # fmt: skip
def test_the_command_line_is_that_of_train(
    monkeypatch: pytest.MonkeyPatch, command: Any, words: list[str], said: dict[str, Any]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(train, "main", lambda: told.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["command.py", "strategy=pipeline_zbv", *words])
    command.main()
    config = composed(*told[1:])
    found = {"command": config["command"], "precision": config["trainer"]["precision"]}
    found |= {"schedule": config["strategy"].get("schedule"), "devices": config["plan"]["devices"]}
    assert found | said == found


def test_the_first_row_is_left_for_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    words = [*DIGITS, "strategy=single", "+command=plan", "plan.devices=2", "plan.memory=1GiB", "plan.device=h100"]
    folder = done(pool, composed(*words, folder=tmp_path))
    said = json.loads((folder / record.PLAN).read_text())
    taken = said["best"]
    assert taken in [row["overrides"] for row in said["rows"]]
    with (folder / "plan.csv").open() as stream:
        records = [*csv.DictReader(stream)]
    assert [record["words"].split() for record in records] == [row["overrides"] for row in said["rows"]]
    assert records[0]["verdict"] == "best" and (folder / "plan.png").exists() == (find_spec("matplotlib") is not None)
    assert "cluster.devices=2" in taken
    assert problems(*DIGITS, *taken) == []
    assert set(record.read_metrics(folder)) == {"seconds_per_step", "bytes"}


def test_what_does_not_fit_ends_in_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    words = [*DIGITS, "strategy=single", "+command=plan", "plan.memory=1KiB", "plan.device=h100"]
    with pytest.raises(Exception, match="memory=1 KiB: no layout"):
        done(pool, composed(*words, folder=tmp_path))


def test_values_are_checked() -> None:
    wrong = problems("plan.devices=0", "plan.memory=2apples", "plan.device=abacus")
    assert [problem.path for problem in wrong] == ["plan.devices", "plan.memory", "plan.device"]  # type: ignore[union-attr]


@pytest.mark.programs
def test_auto_trains_what_the_plan_takes(tmp_path: Path) -> None:
    words = [*DIGITS, "trainer=smoke", "strategy=auto", "plan.device=h100", "cluster.devices=2"]
    given = [*words, f"hydra.run.dir={tmp_path}/run", f"paths.data_dir={tmp_path}/data"]
    command = [sys.executable, "-m", "recipes.train", *given]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    said = record.read(tmp_path / "run")
    assert said["status"] == "completed" and "strategy=auto" not in said["overrides"]
    taken = [word for word in said["overrides"] if word.startswith("strategy=")]
    assert len(taken) == 1 and taken[0] in ran.stdout
