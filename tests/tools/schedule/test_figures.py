"""The figures of a schedule that is not run are what theory says."""

from __future__ import annotations

import pytest

from lightning_parallel.schedules.generators import gpipe
from lightning_parallel.schedules.named import asynchronous
from lightning_parallel.schedules.simulate import Simulation, simulate
from tools.schedule.costs import full_span, utilisation
from tools.schedule.figures import clock_table


def steady_utilisation(simulation: Simulation) -> float:
    """Utilisation over the middle half of the steady state: many whole periods, fill and drain far away."""
    full = full_span(simulation)
    assert full is not None
    begin, end = full
    quarter = (end - begin) / 4
    return utilisation(simulation, begin + quarter, end - quarter)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_asynchronous_never_waits_in_the_steady_state(stages: int, microbatches: int, extra: int) -> None:
    simulation = simulate(asynchronous(stages, microbatches, 6 * stages, extra), forward=1.0, backward=2.0)
    full = full_span(simulation)
    assert full is not None
    assert utilisation(simulation, *full) == pytest.approx(1.0)


def test_latency_is_paid_twice_a_microbatch_unless_one_more_is_in_flight() -> None:
    # Without slack a microbatch takes f + b + 2 l (p - 1) / p, which goes to f + b + 2 l in a long pipeline.
    simulation = simulate(asynchronous(16, 1, 100), 20.0, 40.0, latency=3.0)
    assert steady_utilisation(simulation) == pytest.approx(60 / 66, abs=0.01)
    # One more in flight a link hides any latency up to (f + b) / 2.
    simulation = simulate(asynchronous(16, 1, 100, extra_in_flight=1), 20.0, 40.0, latency=30.0)
    assert steady_utilisation(simulation) == pytest.approx(1.0)


def test_the_table_draws_columns_in_proportion_to_time() -> None:
    assert clock_table(gpipe(2, 2)).splitlines() == [
        "stage 0 | F0 F1  .  .  . B0 == B1 ==|",
        "stage 1 |  . F0 F1 B0 == B1 ==| .  .",
    ]
    assert clock_table(simulate(gpipe(2, 1), step=1.0)).splitlines() == [
        "stage 0 | F0  .  .  . B0 ==  S|",
        "stage 1 |  . F0 B0 ==  S| .  .",
    ]
    assert clock_table(simulate(gpipe(1, 1)), column=0.5).splitlines() == ["stage 0 | F0 == B0 == == ==|"]
