from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable

import pytest

from lightning_parallel.pipeline.schedule import (
    SYNCHRONOUS,
    Backward,
    Forward,
    Schedule,
    Step,
    asynchronous,
    gpipe,
    naive,
    one_f_one_b,
)
from lightning_parallel.pipeline.simulate import (
    Simulation,
    Timed,
    asynchronous_utilisation,
    bubble,
    main,
    render,
    simulate,
)

SIZES = [(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (4, 4), (4, 8), (8, 16)]


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_flushing_schedules_reach_the_flush_ideal(
    generate: Callable[[int, int], Schedule], stages: int, microbatches: int
) -> None:
    simulation = simulate(generate(stages, microbatches), forward=1.5, backward=2.25)
    assert simulation.makespan == pytest.approx((microbatches + stages - 1) * (1.5 + 2.25))


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_simulated_bubble_equals_theory(name: str, stages: int, microbatches: int) -> None:
    simulation = simulate(SYNCHRONOUS[name](stages, microbatches), forward=20.0, backward=40.0)
    assert simulation.bubble == pytest.approx(bubble(name, stages, microbatches))


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_activations_held(stages: int, microbatches: int) -> None:
    assert simulate(naive(stages, microbatches)).peak_activations == [1] * stages
    assert simulate(gpipe(stages, microbatches)).peak_activations == [microbatches] * stages
    flushed = simulate(one_f_one_b(stages, microbatches)).peak_activations
    assert flushed == [min(stages - s, microbatches) for s in range(stages)]
    endless = simulate(asynchronous(stages, microbatches, updates=2 * stages)).peak_activations
    assert endless == [stages - s for s in range(stages)]


def steady_utilisation(simulation: Simulation) -> float:
    """Utilisation over the middle half of the steady state: many whole periods, fill and drain far away."""
    assert simulation.steady is not None
    begin, end = simulation.steady
    quarter = (end - begin) / 4
    return simulation.utilisation(begin + quarter, end - quarter)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_asynchronous_never_waits_in_the_steady_state(stages: int, microbatches: int, extra: int) -> None:
    simulation = simulate(asynchronous(stages, microbatches, 6 * stages, extra), forward=1.0, backward=2.0)
    assert simulation.steady is not None
    assert simulation.utilisation(*simulation.steady) == pytest.approx(1.0)


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("latency", [0.05, 0.3, 1.5, 4.0])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_latency_costs_what_the_formula_says(stages: int, latency: float, extra: int) -> None:
    simulation = simulate(asynchronous(stages, 1, 200, extra), 1.0, 2.0, latency=latency)
    expected = asynchronous_utilisation(stages, extra, 1.0, 2.0, latency)
    assert steady_utilisation(simulation) == pytest.approx(expected, rel=0.01)


def test_latency_is_paid_twice_a_microbatch_unless_one_more_is_in_flight() -> None:
    # Without slack a microbatch takes f + b + 2 l (p - 1) / p, which goes to f + b + 2 l in a long pipeline.
    simulation = simulate(asynchronous(16, 1, 300), 20.0, 40.0, latency=3.0)
    assert steady_utilisation(simulation) == pytest.approx(60 / 66, abs=0.01)
    # One more in flight a link hides any latency up to (f + b) / 2.
    simulation = simulate(asynchronous(16, 1, 300, extra_in_flight=1), 20.0, 40.0, latency=30.0)
    assert steady_utilisation(simulation) == pytest.approx(1.0)


def test_latency_delays_every_message() -> None:
    simulation = simulate(gpipe(3, 1), forward=1.0, backward=2.0, latency=0.5)
    assert simulation.makespan == pytest.approx(3 * (1.0 + 2.0) + 4 * 0.5)
    assert simulation.rows[1][0] == Timed(Forward(1, 0), 1.5, 2.5)


def test_durations_may_differ_by_stage_and_steps_count_as_busy() -> None:
    simulation = simulate(gpipe(2, 2), forward=[1.0, 3.0], backward=[2.0, 5.0], step=[0.0, 0.5])
    assert simulation.rows[0] == [
        Timed(Forward(0, 0), 0.0, 1.0),
        Timed(Forward(0, 1), 1.0, 2.0),
        Timed(Backward(0, 0), 12.0, 14.0),
        Timed(Backward(0, 1), 17.0, 19.0),
        Timed(Step(0, 0), 19.0, 19.0),
    ]
    assert simulation.rows[1][-1] == Timed(Step(1, 0), 17.0, 17.5)
    assert simulation.busy == [6.0, 16.5]
    assert simulation.bubble == pytest.approx(1 - 22.5 / 38)


def test_one_round_of_a_synchronous_schedule_has_no_steady_state() -> None:
    assert simulate(gpipe(4, 8)).steady is None


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"forward": 0.0}, "forward=0.0"),
        ({"backward": [1.0, -1.0]}, "backward="),
        ({"forward": [1.0]}, "one for each of the 2 stages"),
        ({"step": -1.0}, "step=-1.0"),
        ({"latency": -0.1}, "latency=-0.1"),
    ],
)
def test_bad_durations_are_refused_by_name(arguments: dict[str, float], setting: str) -> None:
    with pytest.raises(ValueError, match=re.escape(setting)):
        simulate(gpipe(2, 2), **arguments)


def test_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="schedule='zigzag': give one of naive, gpipe, 1f1b, async"):
        bubble("zigzag", 2, 2)


def test_render_draws_columns_in_proportion_to_time() -> None:
    assert render(gpipe(2, 2)).splitlines() == [
        "stage 0 | F0 F1  .  .  . B0 == B1 ==|",
        "stage 1 |  . F0 F1 B0 == B1 ==| .  .",
    ]
    assert render(simulate(gpipe(2, 1), step=1.0)).splitlines() == [
        "stage 0 | F0  .  .  . B0 ==  S|",
        "stage 1 |  . F0 B0 ==  S| .  .",
    ]
    assert render(simulate(gpipe(1, 1)), unit=0.5).splitlines() == ["stage 0 | F0 == B0 == == ==|"]


def test_render_shows_every_action_when_times_fall_between_columns() -> None:
    simulation = simulate(asynchronous(4, 1, 12), 1.0, 2.3, latency=0.37)
    for line in render(simulation).splitlines():
        words = line.replace("|", " ").split()
        assert [w for w in words if w[0] == "F"] == [f"F{k}" for k in range(12)]
        assert [w for w in words if w[0] == "B"] == [f"B{k}" for k in range(12)]
        assert line.count("|") == 1 + 12


def test_render_keeps_to_the_width() -> None:
    lines = render(asynchronous(12, 1, 30), width=60).splitlines()
    assert {len(line) for line in lines} == {60}
    assert lines[0].startswith("stage 0  |")
    assert lines[11].startswith("stage 11 |")
    assert lines[0].endswith(" ...")


def test_command_line_prints_table_bubble_and_activations(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "--stages", "4", "--microbatches", "8"])
    printed = capsys.readouterr().out
    assert render(one_f_one_b(4, 8)) in printed
    assert "0.273 simulated, 0.273 by theory" in printed
    assert "activations held  4 3 2 1" in printed


def test_command_line_describes_the_asynchronous_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["async", "--stages", "3", "--microbatches", "2", "--updates", "20"])
    printed = capsys.readouterr().out
    assert render(asynchronous(3, 2, 20)) in printed
    assert "1.000 simulated in the steady state, 1.000 by theory" in printed
    assert "mean staleness    1 0.5 0 updates" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpipe --stages 0", "stages=0"),
        ("gpipe --stages 2 --microbatches 0", "microbatches=0"),
        ("gpipe --stages 2 --updates 3", "belong to async"),
        ("async --stages 2 --extra-in-flight -1", "extra_in_flight=-1"),
    ],
)
def test_command_line_refuses_bad_sizes_without_a_traceback(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_schedule_runs_as_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "naive", "--stages", "2", "--microbatches", "1"])
    runpy.run_module("lightning_parallel.pipeline", run_name="__main__")
    assert render(naive(2)) in capsys.readouterr().out
