"""tools/study/arms: which runs are wanted, and in which order."""

from __future__ import annotations

import json
from math import inf

from tests.tools.study.small import TINY
from tools.study.arms import OPTIMIZERS, RATES, STAGES, TIE, Arm, Run, arms, chosen, tried, wanted

ARM = Arm("adamw", 4, 8)
LOW, MIDDLE, HIGH = RATES["adamw"]


def losses(by_rate: dict[float, float]) -> dict[Run, float]:
    return {Run(TINY, ARM, rate, 0): loss for rate, loss in by_rate.items()}


def test_rates_come_first_and_then_the_other_seeds_at_the_best() -> None:
    known: dict[float, float] = {}
    for rate, loss in ((LOW, 2.0), (MIDDLE, 1.0), (HIGH, 3.0)):
        assert wanted(TINY, ARM, 3, losses(known)) == [Run(TINY, ARM, each, 0) for each in RATES["adamw"]]
        known[rate] = loss
    runs = wanted(TINY, ARM, 3, losses(known))
    assert runs[3:] == [Run(TINY, ARM, MIDDLE, 1), Run(TINY, ARM, MIDDLE, 2)]


def test_a_best_rate_at_an_edge_asks_for_the_next_beyond_it() -> None:
    up = {LOW: 3.0, MIDDLE: 2.0, HIGH: 1.0}
    assert tried(TINY, ARM, losses(up)) == ([LOW, MIDDLE, HIGH, 2 * HIGH], None)
    assert tried(TINY, ARM, losses(up | {2 * HIGH: 1.5})) == ([LOW, MIDDLE, HIGH, 2 * HIGH], HIGH)
    further = losses(up | {2 * HIGH: 0.5})
    assert tried(TINY, ARM, further) == ([LOW, MIDDLE, HIGH, 2 * HIGH, 4 * HIGH], None)
    down = {LOW: 1.0, MIDDLE: 2.0, HIGH: inf}
    assert tried(TINY, ARM, losses(down)) == ([LOW / 2, LOW, MIDDLE, HIGH], None)
    assert tried(TINY, ARM, losses(down | {LOW / 2: 1.1}))[1] == LOW


def test_rates_that_tie_run_all_seeds_and_their_mean_decides() -> None:
    known = losses({LOW: 1.0 + 0.9 * TIE, MIDDLE: 1.0, HIGH: 1.0 + 1.1 * TIE})
    others = [Run(TINY, ARM, rate, 1) for rate in (LOW, MIDDLE)]
    assert wanted(TINY, ARM, 2, known) == [Run(TINY, ARM, rate, 0) for rate in (LOW, MIDDLE, HIGH)] + others
    assert chosen(TINY, ARM, 2, known) == MIDDLE
    assert chosen(TINY, ARM, 2, known | {others[0]: 1.0}) == MIDDLE  # a seed that one lacks does not count
    assert chosen(TINY, ARM, 2, known | dict(zip(others, (1.0, 2.0), strict=True))) == LOW


def test_every_arm_can_run() -> None:
    for arm in arms(OPTIMIZERS, STAGES):
        assert 16 % arm.microbatches == 0
        assert arm.weights != "2bw" or arm.microbatches >= arm.stages
        assert arm.weights != "latest" or arm.microbatches == 1


def test_the_key_holds_all_that_decides_a_result() -> None:
    run = Run(TINY, ARM, LOW, 1)
    key = json.loads(json.dumps(run.key))
    assert Run(type(TINY)(**key["setting"]), Arm(**key["arm"]), key["rate"], key["seed"]) == run
