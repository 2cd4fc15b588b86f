"""results/timelines.py: the timeline of a run is written at its end, and nothing that it lacks ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_parallel.results import timelines
from tests.strategies.observed import Net, loader, make_trainer
from tools.workers.pool import WorkerPool
from tools.workers.worker import texts_of_warnings


def fit_timed(strategy: str, timeline: bool, directory: Path) -> None:
    options = {"microbatches": 2, "timeline": timeline}
    make_trainer(strategy, [], options, max_epochs=1, default_root_dir=directory).fit(Net(), loader())


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_timeline_has_a_row_a_stage(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    pool.run(fit_timed, 2, strategy, True, tmp_path, init=False)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
    assert names == ["stage 0 (rank 1)", "stage 1 (rank 0)"]
    first, second = (
        min(event["ts"] for event in events if event["tid"] == stage and event.get("cat") == "forward")
        for stage in (0, 1)
    )
    assert first < second, "the rows are the stages that they are called"


def fit_without_matplotlib(directory: Path) -> list[str]:
    fit_timed("sync", False, directory)
    assert not list(directory.rglob("timeline.*")), "it wasn't asked for"
    find = timelines.find_spec

    def without(name: str, *given: Any) -> Any:
        return None if name == "matplotlib" else find(name, *given)

    with mock.patch.object(timelines, "find_spec", without), texts_of_warnings() as told:
        fit_timed("sync", True, directory)
    return [text for text in told if "matplotlib" in text]


def test_without_matplotlib_the_start_says_so_and_the_end_writes_the_rest(pool: WorkerPool, tmp_path: Path) -> None:
    said, *others = pool.run(fit_without_matplotlib, 2, tmp_path, init=False)
    assert len(said) == 1 and "pip install 'lightning-parallel[pictures]'" in said[0]
    assert not any(others)
    assert (tmp_path / "timeline.json").exists() and not (tmp_path / "timeline.png").exists()
