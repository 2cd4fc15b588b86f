"""``python -m tools.schedule``: the table, its figures, and mistakes without a traceback."""

from __future__ import annotations

import pytest

from lightning_parallel.schedules.generators import one_f_one_b
from lightning_parallel.schedules.named import asynchronous
from tools.schedule.__main__ import main
from tools.schedule.figures import clock_table


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
