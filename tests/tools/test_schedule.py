"""``python -m tools.schedule``: the table, figures as theory has them, and mistakes without a traceback."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_parallel.schedules.generators import gpipe, one_f_one_b
from lightning_parallel.schedules.named import asynchronous
from lightning_parallel.schedules.simulate import Simulation, simulate
from tools.schedule.__main__ import main
from tools.schedule.costs import full_span, utilisation
from tools.schedule.figures import clock_table


def steady_utilisation(simulation: Simulation) -> float:
    """Utilisation over the middle half of the steady state: many whole periods, fill and drain far away."""
    full = full_span(simulation)
    assert full is not None
    begin, end = full
    quarter = (end - begin) / 4
    return utilisation(simulation, begin + quarter, end - quarter)


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


@pytest.mark.parametrize(("arguments", "table", "said"), [
    ("1f1b --stages 4 --microbatches 8", one_f_one_b(4, 8),
     ["0.273 simulated, 0.273 by theory", "activations held  4 3 2 1"]),
    ("zbv --stages 4 --microbatches 8 --activation-memory 0.75", None, ["activations held  6 6 6 6 microbatches"]),
    ("async_vmin --stages 4 --microbatches 8 --updates 20", asynchronous(4, 8, 20, schedule="vmin"),
     ["0.960 simulated in the steady state, 0.960 by theory", "activations held  4 4 4 4 microbatches",
      "mean staleness    0.25 0.25 0.25 0.125"]),
    ("async --stages 3 --microbatches 2 --updates 20", asynchronous(3, 2, 20),
     ["1.000 simulated in the steady state, 1.000 by theory", "mean staleness    1 0.5 0 updates"]),
])  # fmt: skip
def test_command_line_prints_table_bubble_activations_and_staleness(
    arguments: str, table: Any, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments.split())
    printed = capsys.readouterr().out
    assert table is None or clock_table(table) in printed
    assert all(each in printed for each in said), printed


@pytest.mark.parametrize(("arguments", "message"), [
    ("gpipe --stages 0", "stages=0"),
    ("gpipe --stages 2 --updates 3", "belong to async"),
    ("vmin --stages 2 --activation-memory 0.5", "belongs to zbv"),
])  # fmt: skip
def test_command_line_refuses_bad_sizes_without_a_traceback(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err
