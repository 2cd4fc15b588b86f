"""``python -m tools.schedule``: the table, figures as theory has them, and mistakes without a traceback."""

from __future__ import annotations

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


def test_command_line_prints_table_bubble_and_activations(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "--stages", "4", "--microbatches", "8"])
    printed = capsys.readouterr().out
    assert clock_table(one_f_one_b(4, 8)) in printed
    assert "0.273 simulated, 0.273 by theory" in printed
    assert "activations held  4 3 2 1" in printed


def test_a_limit_of_memory_bounds_what_stages_hold(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zbv", "--stages", "4", "--microbatches", "8", "--activation-memory", "0.75"])
    assert "activations held  6 6 6 6 microbatches" in capsys.readouterr().out


def test_command_line_describes_the_asynchronous_schedule_in_a_v(capsys: pytest.CaptureFixture[str]) -> None:
    main(["async_vmin", "--stages", "4", "--microbatches", "8", "--updates", "20"])
    printed = capsys.readouterr().out
    assert clock_table(asynchronous(4, 8, 20, schedule="vmin")) in printed
    assert "0.960 simulated in the steady state, 0.960 by theory" in printed
    assert "activations held  4 4 4 4 microbatches" in printed  # of half a stage
    assert "mean staleness    0.25 0.25 0.25 0.125" in printed


def test_command_line_describes_the_asynchronous_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["async", "--stages", "3", "--microbatches", "2", "--updates", "20"])
    printed = capsys.readouterr().out
    assert clock_table(asynchronous(3, 2, 20)) in printed
    assert "1.000 simulated in the steady state, 1.000 by theory" in printed
    assert "mean staleness    1 0.5 0 updates" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpipe --stages 0", "stages=0"),
        ("gpipe --stages 2 --microbatches 0", "microbatches=0"),
        ("gpipe --stages 2 --updates 3", "belong to async"),
        ("vmin --stages 2 --activation-memory 0.5", "belongs to zbv"),
        ("async --stages 2 --updates 0", "updates=0"),
        ("async --stages 2 --extra-in-flight -1", "extra_in_flight=-1"),
    ],
)
def test_command_line_refuses_bad_sizes_without_a_traceback(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err
