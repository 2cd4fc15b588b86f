"""What the kill matrix is made of, and what a run of it leaves: results and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import page
from tests.torture.cases import SAMPLE, Case, cases
from tests.torture.fault import LAUNCHER, Kind, Moment
from tests.torture.layouts import LAYOUTS
from tests.torture.outcome import Verdict, check_words
from tests.torture.record import Results


def case(name: str) -> Case:
    (found,) = cases(name)
    return found


def test_every_rank_and_moment_is_in_it_with_every_fault() -> None:
    every = cases()
    assert len({each.name for each in every}) == len(every)
    of_ranks = {(each.layout, each.target, each.moment, each.kind) for each in every if each.target != LAUNCHER}
    left_out = [(layout, 0, moment, Kind.STOP) for layout in LAYOUTS if layout.ranks == 1 for moment in Moment]
    assert len(of_ranks) + len(left_out) == sum(layout.ranks for layout in LAYOUTS) * len(Moment) * len(Kind)
    assert of_ranks.isdisjoint(left_out)


def test_the_sample_has_every_layout_moment_and_fault() -> None:
    sample = [case(name) for name in SAMPLE]
    assert {each.layout for each in sample} == set(LAYOUTS)
    assert {each.moment for each in sample} == set(Moment)
    assert {each.kind for each in sample} == set(Kind)
    assert LAUNCHER in {each.target for each in sample}


@pytest.mark.parametrize(("name", "by"), [
    ("fsdp 2, rank 1, before the rename, SIGKILL", 0),
    ("fsdp 2, rank 1, writing, SIGKILL", 1),
    ("ddp 2, rank 1, writing, SIGKILL", 0),
    ("ddp 2, launcher, forward, SIGKILL", 0),
])  # fmt: skip
def test_a_rank_that_has_no_part_in_a_moment_waits_for_the_one_that_has(name: str, by: int) -> None:
    assert case(name).by == by


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


def results() -> Results:
    held, failed = "1F1B 2, rank 1, backward, SIGKILL", "ddp 2, rank 0, writing, SIGTERM"
    verdicts = {held: Verdict([], 2.4, "failed", 4, 40.0), failed: Verdict(["left: a|b"], 61.0, "running", 2, 90.0)}
    return Results(verdicts, {"date": "2026-01-01", "machine": "2 cores", "torch": "2.13.0"})


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = results()
    made.write(tmp_path / "torture.json")
    assert Results.read(tmp_path / "torture.json") == made


def test_results_count_how_often_a_case_has_come_out_the_same(tmp_path: Path) -> None:
    recorded, again, other = results(), results(), results()
    held, failed = sorted(recorded.verdicts)
    other.verdicts[held].problems.append("hangs")
    recorded.add(again)
    assert [recorded.verdicts[name].times for name in (held, failed)] == [2, 2]
    recorded.add(other)
    assert [recorded.verdicts[name].times for name in (held, failed)] == [1, 3] and not recorded.verdicts[held].held


def test_the_page_shows_every_case(tmp_path: Path) -> None:
    file = tmp_path / "torture.md"
    page.write(results(), file)
    text = file.read_text()
    assert "| backward | rank 1 | 2 s |" in text and "| writing | rank 0 |  | **failed** |" in text
    assert r"ddp 2, rank 0, writing, SIGTERM: left: a\|b." in text
    assert f"2 of {len(cases())} cases have been run" in text
