"""tools/study/clock: the formulas, by hand."""

from __future__ import annotations

import pytest

from lightning_parallel.schedules.generators import one_f_one_b
from lightning_parallel.schedules.named import asynchronous
from lightning_parallel.schedules.simulate import simulate
from tools.study import clock

LEAST, MOST = {(4, 8): 0.6, (8, 16): 0.5}, {(4, 8): 0.9, (8, 16): 0.8}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    late = dict.fromkeys(("async", "vhalf", "vmin"), MOST)
    monkeypatch.setattr(clock, "MEASURED", {"1f1b": LEAST, "zbv": MOST, **late})


def test_an_update_takes_as_long_as_was_measured() -> None:
    assert clock.synchronous("1f1b", 8, 16, 1) == pytest.approx(1 / 0.5)
    assert clock.synchronous("zbv", 4, 8, 10) == pytest.approx(10 / 0.9)
    assert clock.asynchronous(8, 16, 1000) == pytest.approx((1000 + 7 / 16) / 0.8)  # it is filled once


@pytest.mark.parametrize(("stages", "microbatches"), [(8, 16), (4, 4), (2, 1)])
def test_theory_is_the_schedules(stages: int, microbatches: int) -> None:
    f, b, updates = 1.0, 2.0, 5
    batch = microbatches * (f + b)  # the unit
    flushed = simulate(one_f_one_b(stages, microbatches), f, b)
    assert batch / flushed.makespan == pytest.approx(clock.theory("1f1b", stages, microbatches))
    assert clock.theory("1f1b", stages, microbatches) < clock.theory("zbv", stages, microbatches) <= 1
    endless = simulate(asynchronous(stages, microbatches, updates), f, b).makespan
    used = clock.asynchronous(stages, microbatches, 1) - clock.asynchronous(stages, microbatches, 0)
    assert endless / batch * used == pytest.approx(clock.asynchronous(stages, microbatches, updates))


def test_in_a_v_the_last_stage_waits_for_each_batch() -> None:
    for shape, busy in (("vmin", 0.906), ("vhalf", 0.970)):
        assert clock.theory(shape, 8, 16) == pytest.approx(busy, abs=1e-3)


def test_other_sizes_lose_the_least_measured_where_synchronous_and_the_most_where_asynchronous() -> None:
    for schedule, kept in (("zbv", max), ("vmin", min)):
        shares = [share / clock.theory(schedule, *sizes) for sizes, share in MOST.items()]
        assert clock.busy(schedule, 6, 12) == pytest.approx(clock.theory(schedule, 6, 12) * kept(shares))


def test_a_loss_is_reached_between_two_validations() -> None:
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert clock.reached(curve, 3.25) == 87.5
    assert clock.reached(curve, 2.5) == pytest.approx(150 + 50 * 2 / 3)
    assert clock.reached(curve, 2.0) == 200
    assert clock.reached(curve, 5.0) == 50
    assert clock.reached(curve, 1.9) is None
    assert clock.reached([], 1.9) is None
