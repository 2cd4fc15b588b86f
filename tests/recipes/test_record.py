"""recipes/record.py, report.py, rerun.py: the record of a run and of each start of its workers; runs side by side, and
one that is repeated."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import launch, record, report, rerun, work
from recipes.problem import ConfigError
from recipes.processes import joined, may_be_told, missing, restarts
from recipes.train import UnknownMetric, _optimized
from tests.recipes.runs import composed
from tests.recipes.test_launchers import Imaginary
from tests.recipes.test_local import TINY

START = "2026-01-01T00:00:00.000+00:00"


def test_metrics_are_numbers_and_a_diverged_one_is_null(tmp_path: Path) -> None:
    record.write_metrics(tmp_path, {"b": 1, "a": float("inf"), "c": 0.5})
    assert record.read_metrics(tmp_path) == {"a": None, "b": 1.0, "c": 0.5}
    assert "Infinity" not in (tmp_path / record.METRICS).read_text()


def test_a_rank_s_place_is_that_of_the_recorded_layout(tmp_path: Path) -> None:
    assert record.place(tmp_path, 0) == ""  # nothing is recorded yet
    places = itertools.product(range(2), range(1), range(3))
    ranks = [
        {"rank": rank, "coordinates": {"data": data, "tensor": tensor, "pipeline": stage}}
        for rank, (data, tensor, stage) in enumerate(places)
    ]
    (tmp_path / record.RUN).write_text(json.dumps({"layout": {"ranks": ranks}}))
    assert record.place(tmp_path, 5) == "stage 2 of 3, replica 1 of 2"
    assert record.place(tmp_path, 6) == ""


def write(folder: Path, lr: str, **said: Any) -> None:
    folder.mkdir(parents=True)
    overrides = ["model=mlp", f"optimizer.lr={lr}", "+tags=[a]"]
    content = {"status": "completed", "started": START, "ended": None, "overrides": overrides, "attempts": [{}]}
    (folder / record.RUN).write_text(json.dumps({**content, **said}))
    (folder / record.CONFIG).write_text(yaml.safe_dump({"optimized_metric": "val_loss"}))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write(tmp_path / "2", "0.1", metrics={"val_loss": 0.5}, ended="2026-01-01T00:01:30.000+00:00")
    write(tmp_path / "10", "0.2", metrics={"val_loss": 0.25, "val_acc": 1.0}, attempts=[{}, {}])
    write(tmp_path / "11", "0.3", status="starting", overrides=None)
    (tmp_path / "12").mkdir()
    return tmp_path


def test_runs_are_in_order_with_what_differs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = report.report(sweep)
    numbers = {"status": "completed", "val_loss": 0.5, "seconds": 90, "attempts": 1}
    assert first == {"run": "2", "model": "mlp", "optimizer.lr": "0.1", "tags": "[a]", **numbers}  # the third has none
    assert (second["run"], second["seconds"], second["attempts"]) == ("10", None, 2)
    assert (third["run"], third["status"]) == ("11", "starting") and "val_loss" not in third
    with (sweep / report.CSV).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["val_loss"] for row in rows] == ["0.5", "0.25", ""] and rows[1]["val_acc"] == "1.0"
    assert "0.25" in capsys.readouterr().out


def test_a_run_is_known_by_what_it_runs_not_by_where(tmp_path: Path) -> None:
    config = composed("strategy=single")
    assert not record.is_of(tmp_path, config)
    (tmp_path / record.RUN).write_text(json.dumps({"config_hash": record.config_hash(config)}))
    elsewhere = {**config, "paths": {**config["paths"], "log_dir": "elsewhere"}}
    assert record.is_of(tmp_path, elsewhere) and not record.is_of(tmp_path, {**config, "seed": 2})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run."""
    monkeypatch.setattr("recipes.build.launcher", lambda config: Imaginary(2, "short"))
    folder = tmp_path / "run"
    folder.mkdir()
    config = composed("strategy=single", "ckpt_path=last", *TINY, folder=folder)
    launch.write(config)
    launch.launch(config, {"model": "mlp"}, ["model=mlp"])
    return folder


def change(folder: Path, **fields: Any) -> None:
    content = record.read(folder)
    (folder / record.RUN).write_text(json.dumps({**content, **fields}))


def test_a_run_is_repeated_beside_itself(run: Path) -> None:
    assert rerun.rerun(run) == []
    assert rerun.rerun(run) == []
    first, second = (run.with_name(f"run-again-{number}") for number in (1, 2))
    for new in (first, second):
        config = yaml.safe_load((new / record.CONFIG).read_text())
        assert config["paths"]["output_dir"] == str(new) and config["ckpt_path"] is None
        assert config["callbacks"]["checkpoint"]["dirpath"] == f"{new}/checkpoints"
        said = record.read(new)
        assert (said["status"], said["choices"], said["overrides"]) == ("completed", {"model": "mlp"}, ["model=mlp"])


def test_what_differs_is_told(run: Path) -> None:
    versions = record.read(run)["versions"]
    change(run, versions={**versions, "torch": "1.0"}, git=None, data="other", metrics={"val_loss": 0.4})
    code, git, data, metrics = rerun.rerun(run)
    assert code == f"versions.torch: 1.0 then, {versions['torch']} now" and git.startswith("git: None then")
    assert data == "data: other then, None now" and metrics == "metrics.val_loss: 0.4 then, 0.5 now"


def test_paths_are_moved_as_wholes() -> None:
    config = {"a": ["/x/1", "/x/1/b", "/x/10/c", 3], "b": {"c": "/x/é 'q'", "d": None}}
    assert record._moved(config, "/x/1", "/new") == {**config, "a": ["/new", "/new/b", "/x/10/c", 3]}
    assert record._moved(config, "/x/é 'q'", "/new")["b"] == {"c": "/new", "d": None}


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a run"):
        rerun.rerun(tmp_path)
    with pytest.raises(SystemExit, match="is no folder of a run"):
        rerun.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="has no runs"):
        report.main([str(tmp_path)])


def test_the_metric_to_optimise_is_returned_or_its_name_refused() -> None:
    metrics = {"val_loss": 1.5, "train_loss": None}
    assert _optimized("val_loss", metrics, sweeping=True) == 1.5
    assert _optimized(None, metrics, sweeping=True) is None
    assert _optimized("loss", metrics, sweeping=False) is None  # nobody asks for it
    diverged = _optimized("train_loss", metrics, sweeping=True)
    assert diverged is not None and math.isnan(diverged)
    with pytest.raises(UnknownMetric, match="optimized_metric=loss: .*; use one of val_loss, train_loss"):
        _optimized("loss", metrics, sweeping=True)


ENGINES = ("RECIPES_LAUNCHER", "RECIPES_RESTARTS", "SLURM_RESTART_COUNT", "SLURM_JOB_ID")
PROCESSES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENGINES, *PROCESSES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def started(folder: Path, *overrides: str) -> None:
    config: dict[str, Any] = composed(*overrides)
    record.start(folder, config, {})
    work.begin(folder, config)


def reasons(folder: Path) -> list[Any]:
    return [(each["reason"], each["exit"]) for each in record.read(folder)["attempts"]]


def test_an_attempt_is_recorded_from_its_start_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("MASTER_ADDR", "n0")
    monkeypatch.setenv("MASTER_PORT", "2000")
    started(tmp_path)
    record.update_attempt(tmp_path, to_step=7)
    record.end(tmp_path, "completed")
    (attempt,) = record.read(tmp_path)["attempts"]
    assert attempt.pop("started") <= attempt.pop("ended")
    assert attempt == {
        "engine": "local", "job_id": "12", "rendezvous": "n0:2000", "resumed_from": None,
        "from_step": None, "to_step": 7, "reason": "completed", "exit": 0,
    }  # fmt: skip


def test_the_launcher_corrects_what_rank_0_has_said_and_an_attempt_without_an_end_was_killed(tmp_path: Path) -> None:
    started(tmp_path)
    record.end(tmp_path, "failed", {"rank": 0, "message": "PeerLostError: gone\nmore"})
    record.end(tmp_path, "failed", {"rank": 1, "message": "killed"})
    assert reasons(tmp_path) == [("rank 1: killed", 1)]
    started(tmp_path)
    started(tmp_path, "resume=auto")
    assert reasons(tmp_path) == [("killed", None), (None, None)]
    work.begin(tmp_path, composed())  # its launcher was not
    assert reasons(tmp_path) == [("killed", None), ("killed", None), (None, None)]
    started(tmp_path)  # another run, which has attempts of its own
    assert reasons(tmp_path) == [(None, None)]


def test_who_has_started_this_process_and_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarts() == 0
    for name in ("RECIPES_RESTARTS", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert restarts() == 2
    assert (joined(), may_be_told(), missing()) == (0, False, list(PROCESSES))
    for name, value in zip(PROCESSES, ("1", "4", "1", "2", "n0", "2000"), strict=True):
        monkeypatch.setenv(name, value)
    assert (joined(), may_be_told(), missing()) == (4, True, [])
    monkeypatch.setenv("RECIPES_LAUNCHER", "17")
    assert joined() == 0 and not may_be_told()
