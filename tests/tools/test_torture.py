"""What the kill matrix (`make torture`) is made of, what a run of it leaves, and a case from beginning to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import ROOT
from tests.clusters.disturbed import variables
from tools.torture.cases import SAMPLE, SMALL_SAMPLE, Case, cases
from tools.torture.fault import LAUNCHER, Kind, Moment
from tools.torture.layouts import LAYOUTS
from tools.torture.outcome import check_words


def case(name: str) -> Case:
    (found,) = cases(name)
    return found


def test_every_rank_and_moment_is_in_it_with_every_fault_and_all_are_in_the_sample() -> None:
    every = cases()
    assert len({each.name for each in every}) == len(every)
    of_ranks = {(each.layout, each.target, each.moment, each.kind) for each in every if each.target != LAUNCHER}
    left_out = [(layout, 0, moment, Kind.STOP) for layout in LAYOUTS if layout.ranks == 1 for moment in Moment]
    assert len(of_ranks) + len(left_out) == sum(layout.ranks for layout in LAYOUTS) * len(Moment) * len(Kind)
    assert of_ranks.isdisjoint(left_out)
    sample = [case(name) for name in SAMPLE]
    assert {each.layout for each in sample} == set(LAYOUTS)
    assert {each.moment for each in sample} == set(Moment)
    assert {each.kind for each in sample} == set(Kind)
    assert LAUNCHER in {each.target for each in sample}


@pytest.mark.parametrize(("kind", "code", "said", "held"), [
    ("SIGKILL", 1, {"status": "failed", "error": {"rank": 1, "message": "killed by SIGKILL"}}, True),
    ("SIGKILL", 1, {"status": "failed", "error": {"rank": 0, "message": "PeerLostError: ..."}}, False),
    ("SIGKILL", 75, {"status": "preempted"}, False),
    ("SIGTERM", 75, {"status": "preempted"}, True),
    ("SIGTERM", 1, {"status": "failed", "error": {"rank": 1, "message": "killed by SIGKILL"}}, False),
    ("SIGSTOP", 1, {"status": "failed", "error": {"rank": 1, "message": "killed by SIGKILL"}}, False),
    ("exception", 1, {"status": "failed", "error": {"rank": 0, "message": "rank 1: InjectedError: ..."}}, True),
])  # fmt: skip
def test_a_run_has_to_say_what_happened(kind: str, code: int, said: dict[str, object], held: bool) -> None:
    assert (not list(check_words(case(f"1F1B 2, rank 1, forward, {kind}"), code, said))) == held


@pytest.mark.programs
@pytest.mark.parametrize("name", SMALL_SAMPLE)
def test_a_run_goes_on_after_it(tmp_path: Path, name: str) -> None:
    """As the matrix is run: by a process that has imported everything, and that others are forked from."""
    folders = ["--out", tmp_path / "torture.json", "--folder", tmp_path / "runs"]
    program = [sys.executable, "-m", "tools.torture", "--only", name, "--jobs", "1", *folders]
    done = subprocess.run(program, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "1 of 1 cases held" in done.stdout, done.stdout + done.stderr
