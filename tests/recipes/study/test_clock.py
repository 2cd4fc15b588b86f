"""recipes/study/clock: the formulas, by hand."""

from __future__ import annotations

import pytest

from lightning_parallel.pipeline.async_schedule import asynchronous
from lightning_parallel.pipeline.schedule import one_f_one_b
from lightning_parallel.pipeline.simulate import simulate
from recipes.study import clock


def test_a_synchronous_update_pays_the_bubble_and_what_was_measured() -> None:
    assert clock.synchronous(8, 16, 1) == pytest.approx(23 / 16 * 1.080)
    assert clock.synchronous(8, 8, 10) == pytest.approx(10 * 15 / 8 * 1.074)
    assert clock.synchronous(2, 4, 1) == pytest.approx(5 / 4 * 1.070)


def test_an_asynchronous_pipeline_is_filled_once() -> None:
    assert clock.asynchronous(8, 16, 1000) == pytest.approx((1000 + 7 / 16) / 0.911)
    assert clock.asynchronous(4, 1, 10) == pytest.approx(13 / 0.908)
    assert clock.asynchronous(2, 2, 10) == pytest.approx(10.5 / 0.908)


@pytest.mark.parametrize(("stages", "microbatches"), [(8, 16), (4, 4), (2, 1)])
def test_theory_is_the_schedules(stages: int, microbatches: int) -> None:
    f, b, updates = 1.0, 2.0, 5
    batch = microbatches * (f + b)  # the unit
    flushed = simulate(one_f_one_b(stages, microbatches), f, b).makespan
    assert flushed / batch == pytest.approx(1 / clock.busy(stages, microbatches, synchronous=True))
    endless = simulate(asynchronous(stages, microbatches, updates), f, b).makespan
    used = clock.asynchronous(stages, microbatches, 1) - clock.asynchronous(stages, microbatches, 0)
    assert endless / batch * used == pytest.approx(clock.asynchronous(stages, microbatches, updates))


def test_a_loss_is_reached_between_two_validations() -> None:
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert clock.reached(curve, 3.25) == 87.5
    assert clock.reached(curve, 2.5) == pytest.approx(150 + 50 * 2 / 3)
    assert clock.reached(curve, 2.0) == 200
    assert clock.reached(curve, 5.0) == 50
    assert clock.reached(curve, 1.9) is None
    assert clock.reached([], 1.9) is None
