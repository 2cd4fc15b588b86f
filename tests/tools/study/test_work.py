"""tools/study/work: processes, interruption and resumption."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from recipes.data.sources import stdlib
from tests.tools.study.small import TINY, write_text
from tools.study import work
from tools.study.arms import RATES, Arm, Run
from tools.study.store import Store
from tools.study.text import Text

PLAN = [Arm("adamw"), Arm("adamw", 2, 4, "stash", "second_order")]
LOW, MIDDLE, HIGH = RATES["adamw"]


@pytest.mark.thorough
def test_an_interrupted_study_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    task = write_text(tmp_path / "text")
    others = set(multiprocessing.active_children())  # of other tests
    first: list[Run] = []

    def interrupt(run: Run) -> None:
        first.append(run)
        if len(first) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.perform(TINY, PLAN, 2, Store(tmp_path), task, jobs=2, done=interrupt)
    assert set(multiprocessing.active_children()) == others
    assert set(Store(tmp_path).results) == set(first)

    second: list[Run] = []
    work.perform(TINY, PLAN, 2, Store(tmp_path), task, jobs=2, done=second.append)
    store = Store(tmp_path)
    assert not set(first) & set(second) and set(first) | set(second) == set(store.results)
    assert work.following(TINY, PLAN, 2, store, []) is None
    assert {run.seed for run in store.results} == {0, 1} and {run.arm for run in store.results} == set(PLAN)
    assert all(result["seconds"] >= 0 and result["torch"] for result in store.results.values())

    third: list[Run] = []
    work.perform(TINY, PLAN, 2, store, task, jobs=2, done=third.append)
    assert not third


def test_no_run_starts_after_the_deadline(tmp_path: Path) -> None:
    work.perform(TINY, PLAN, 2, Store(tmp_path), Text(stdlib, "none"), jobs=2, until=0.0)
    assert not Store(tmp_path).results


@pytest.mark.thorough
def test_a_run_that_fails_ends_the_study_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"optimizer='adamw'.* ended with exit code 1"):
        work.perform(TINY, PLAN, 2, Store(tmp_path), Text(stdlib, "none", tmp_path / "no text"), jobs=1)


def test_later_arms_start_while_an_earlier_one_s_rates_are_decided(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def following(*under_way: Run) -> Run | None:
        return work.following(TINY, PLAN, 2, store, under_way)

    first, second, third = (Run(TINY, PLAN[0], rate, 0) for rate in (LOW, MIDDLE, HIGH))
    assert following() == first
    assert following(first, second) == third
    assert following(first, second, third) == Run(TINY, PLAN[1], LOW, 0)
    for run, loss in ((first, 2.0), (second, 1.0), (third, 2.0)):
        store.add(run, {"final": loss})
    assert following(Run(TINY, PLAN[1], LOW, 0)) == Run(TINY, PLAN[0], MIDDLE, 1)
