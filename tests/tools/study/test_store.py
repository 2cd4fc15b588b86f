"""tools/study/store: what was done is found again."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.tools.study.small import TINY
from tools.study.arms import Arm, Run
from tools.study.store import FILE, Store

RUNS = [Run(TINY, Arm("adamw", 4, 8, "stash", "second_order"), rate, seed) for rate in (0.003, 0.1) for seed in (0, 1)]


def test_what_was_added_is_there_for_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    for loss, run in enumerate(RUNS):
        store.add(run, {"final": float(loss)})
    again = Store(tmp_path / "new")
    assert again.results == store.results and again.losses == dict(zip(RUNS, [0.0, 1.0, 2.0, 3.0], strict=True))


def test_rates_are_chosen_by_the_other_text_s_loss_where_there_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    apart = replace(RUNS[0], setting=replace(TINY, choice=4))
    for run in (RUNS[0], apart):
        store.add(run, {"final": 1.0, "choice": 2.0})
    assert store.losses == {RUNS[0]: 1.0, apart: 2.0} and store.finals == {RUNS[0]: 1.0, apart: 1.0}


def test_a_torn_last_line_costs_its_own_run_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run in RUNS[:2]:
        store.add(run, {"final": 1.0})
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-20])
    torn = Store(tmp_path)
    assert list(torn.results) == RUNS[:1]
    torn.add(RUNS[2], {"final": 2.0})
    assert list(Store(tmp_path).results) == [RUNS[0], RUNS[2]]


def test_a_diverged_run_is_done_and_worst(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(RUNS[0], {"final": None})
    assert Store(tmp_path).losses == {RUNS[0]: inf}


def test_two_studies_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "new"), Store(tmp_path / "new")
    with first.alone():
        with pytest.raises(RuntimeError, match="is being written to"), second.alone():
            pass
    with second.alone():
        second.add(RUNS[0], {"final": 1.0})
    assert list(Store(tmp_path / "new").results) == RUNS[:1]
