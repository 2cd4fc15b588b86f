"""recipes/work.py, processes.py: run.json has each start of a run's workers, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes import record, work
from recipes.processes import joined, may_be_told, missing, restarts
from tests.recipes.test_configs import composed

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


def test_the_launcher_corrects_what_rank_0_has_said(tmp_path: Path) -> None:
    started(tmp_path)
    record.end(tmp_path, "failed", {"rank": 0, "message": "PeerLostError: gone\nmore"})
    record.end(tmp_path, "failed", {"rank": 1, "message": "killed"})
    assert reasons(tmp_path) == [("rank 1: killed", 1)]


def test_an_attempt_without_an_end_was_killed(tmp_path: Path) -> None:
    started(tmp_path)
    started(tmp_path, "resume=auto")
    assert reasons(tmp_path) == [("killed", None), (None, None)]
    work.begin(tmp_path, composed())  # its launcher was not
    assert reasons(tmp_path) == [("killed", None), ("killed", None), (None, None)]
    started(tmp_path)  # another run, which has attempts of its own
    assert reasons(tmp_path) == [(None, None)]


@pytest.mark.parametrize("name", ["RECIPES_RESTARTS", "SLURM_RESTART_COUNT"])
def test_every_engine_s_restarts_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarts() == 0
    monkeypatch.setenv(name, "2")
    assert restarts() == 2


def test_who_has_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (joined(), may_be_told(), missing()) == (0, False, list(PROCESSES))
    for name, value in zip(PROCESSES, ("1", "4", "1", "2", "n0", "2000"), strict=True):
        monkeypatch.setenv(name, value)
    assert (joined(), may_be_told(), missing()) == (4, True, [])
    monkeypatch.setenv("RECIPES_LAUNCHER", "17")
    assert joined() == 0 and not may_be_told()
