"""cluster=local: a run whose worker was killed is started again, and ends with the numbers of one left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.disturbed import KILL, KILLED, SAVED, attempts, numbers, train

REASON = "rank 1: killed by SIGKILL (out of memory?)"


@pytest.mark.thorough
def test_a_killed_worker_restarts_the_run(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    said = train(tmp_path, "cluster.max_restarts=1", KILL)
    assert "restart 1 of 1, from the newest whole checkpoint" in said
    killed, last = attempts(tmp_path)
    assert killed in [(REASON, 0, step, 1) for step in (SAVED, KILLED)]  # rank 0 may not know of the last step
    assert last == ("completed", SAVED, 10, 0)
    assert numbers(tmp_path) == undisturbed
