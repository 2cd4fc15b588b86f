"""tools/study/rows: means, distances and ratios, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.study.small import TINY, fill
from tools.study import clock
from tools.study.arms import Arm, Run, arms
from tools.study.clock import Curve
from tools.study.rows import Row, progress, rows
from tools.study.store import Store


def row(arm: Arm, finals: dict[int, float], curves: dict[int, Curve] | None = None) -> Row:
    return Row(arm, 0.01, {}, finals, finals, curves or {})


def test_gaps_are_paired_by_seed() -> None:
    synchronous = row(Arm("adamw"), {0: 2.0, 1: 4.0, 2: 5.0})
    late = row(Arm("adamw", 8, 16), {0: 2.02, 1: 4.4})
    assert late.gaps(synchronous) == pytest.approx({0: 1.0, 1: 10.0})
    assert late.mean == pytest.approx(3.21) and late.deviation == pytest.approx(2.38 / 2**0.5)


def test_the_speed_up_is_a_ratio_of_simulated_times() -> None:
    synchronous = row(Arm("adamw"), {0: 2.0}, {0: [(50, 4.0), (100, 2.0)]})
    late = row(Arm("adamw", 8, 16), {0: 1.0}, {0: [(50, 3.0), (100, 1.0)]})
    expected = clock.synchronous("1f1b", 8, 16, 100) / clock.asynchronous(8, 16, 75)
    assert late.speed_up(synchronous, "1f1b") == pytest.approx(expected)
    slower = clock.busy("1f1b", 8, 16) / clock.busy("zbv", 8, 16)
    assert late.speed_up(synchronous, "zbv") == pytest.approx(expected * slower)
    near = clock.synchronous("zbv", 8, 16, 75) / clock.asynchronous(8, 16, 50)
    assert late.speed_up(synchronous, "zbv", 0.5) == pytest.approx(near)  # to a loss of 3


def test_rows_hold_the_chosen_rate_s_runs_of_decided_arms(tmp_path: Path) -> None:
    plan = list(arms(["adamw"], [4]))
    store = Store(tmp_path)
    fill(store, TINY, plan[:3], 2, lambda run: 2.0 + run.seed + 100 * abs(run.rate - 6e-3))
    undecided = plan[3]
    store.add(Run(TINY, undecided, 6e-3, 0), {"curve": [], "final": 9.0, "final_read": 9.0})
    found = rows(TINY, plan, 2, store)
    assert set(found) == set(plan[:3])
    for each in found.values():
        assert each.rate == 6e-3 and each.finals == {0: 2.0, 1: 3.0} and list(each.rates) == [3e-3, 6e-3, 1.2e-2]
        assert each.curve() == [(3, 5.0), (6, 2.5)]
    assert progress(TINY, plan, 2, store) == (3 * 4 + 1, len(plan) * 4)
