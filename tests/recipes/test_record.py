"""recipes/record.py: the record of a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from recipes import record
from tests.recipes.test_configs import composed


def test_the_hash_is_that_of_what_is_run_not_of_where() -> None:
    here = composed("strategy=single")
    there = {**here, "paths": {**here["paths"], "log_dir": "elsewhere"}}
    assert record.config_hash(here) == record.config_hash(there)
    assert record.config_hash(here) != record.config_hash({**here, "seed": 2})


def test_a_run_is_recorded_from_its_start_to_its_end(tmp_path: Path) -> None:
    record.start(tmp_path, composed(), {"model": "gpt"})
    started = json.loads((tmp_path / record.RUN).read_text())
    assert started["status"] == "starting" and started["ended"] is None
    assert started["choices"] == {"model": "gpt"} and started["seed"] == 1
    assert {"python", "torch", "lightning"} <= set(started["versions"])
    record.update(tmp_path, layout={"world_size": 2})
    record.end(tmp_path, "failed", {"rank": 1, "message": "no", "traceback": None})
    ended = json.loads((tmp_path / record.RUN).read_text())
    assert ended["status"] == "failed" and ended["error"]["rank"] == 1
    assert ended["started"] == started["started"] <= ended["ended"]
    assert ended["layout"] == {"world_size": 2}
    assert [file.name for file in tmp_path.iterdir()] == [record.RUN]


def test_metrics_are_numbers_and_a_diverged_one_is_null(tmp_path: Path) -> None:
    record.write_metrics(tmp_path, {"b": 1, "a": float("inf"), "c": 0.5})
    assert record.read_metrics(tmp_path) == {"a": None, "b": 1.0, "c": 0.5}
    assert "Infinity" not in (tmp_path / record.METRICS).read_text()


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record._git(tmp_path) is None


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
