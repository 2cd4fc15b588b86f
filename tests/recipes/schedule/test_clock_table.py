"""A schedule as text shows every action, in proportion to its time."""

from __future__ import annotations

from lightning_parallel.schedules.generators import gpipe
from lightning_parallel.schedules.simulate import simulate
from recipes.schedule.figures import asynchronous, clock_table


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


def test_the_table_shows_every_action_when_times_fall_between_columns() -> None:
    simulation = simulate(asynchronous(4, 1, 12), 1.0, 2.3, latency=0.37)
    for line in clock_table(simulation).splitlines():
        words = line.replace("|", " ").split()
        assert [w for w in words if w[0] == "F"] == [f"F{k}" for k in range(12)]
        assert [w for w in words if w[0] == "B"] == [f"B{k}" for k in range(12)]
        assert line.count("|") == 1 + 12


def test_the_table_keeps_to_the_width() -> None:
    lines = clock_table(asynchronous(12, 1, 30), width=60).splitlines()
    assert {len(line) for line in lines} == {60}
    assert lines[0].startswith("stage 0  |")
    assert lines[11].startswith("stage 11 |")
    assert lines[0].endswith(" ...")
