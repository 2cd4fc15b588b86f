"""cluster=local: a run whose worker was killed is started again, and ends with the numbers of one left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import ROOT
from tests.clusters.disturbed import KILL, KILLED, SAVED, attempts, command, numbers, train, variables

REASON = "rank 1: killed by SIGKILL (out of memory?)"


@pytest.mark.thorough
def test_a_killed_worker_restarts_the_run(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    said = train(tmp_path, "cluster.max_restarts=1", KILL)
    assert "restart 1 of 1, from the newest whole checkpoint" in said
    killed, last = attempts(tmp_path)
    assert killed in [(REASON, 0, step, 1) for step in (SAVED, KILLED)]  # rank 0 may not know of the last step
    assert last == ("completed", SAVED, 10, 0)
    assert numbers(tmp_path) == undisturbed


@pytest.mark.thorough
def test_a_refused_run_is_not_started_again(tmp_path: Path) -> None:
    program = [sys.executable, *command(tmp_path, "cluster.max_restarts=3", "strategy.layers=[net.nowhere.*]")]
    done = subprocess.run(program, cwd=ROOT, env=variables(), text=True, capture_output=True, timeout=200)
    assert done.returncode == 1 and "matches no module" in done.stderr
    assert "restart 1" not in done.stdout + done.stderr
