"""What is written into pages, drawn for them, or printed: measured plans, comparisons, models on paper, a run that
moves, and schedules (``python -m tools.schedule``)."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.step_time import StepTime
from lightning_parallel.planning.table import Row
from lightning_parallel.schedules.generators import gpipe, one_f_one_b
from lightning_parallel.schedules.named import asynchronous
from lightning_parallel.schedules.simulate import simulate
from recipes import ROOT
from recipes.compare import report as report_of_comparison
from recipes.compare.rows import rows
from tests.recipes.test_compare import outcomes
from tools import comparison, planned
from tools.bench import plan, report
from tools.bench.plan import Judged, Pair, Taken
from tools.bench.plan_models import MODELS
from tools.gallery.captions import unmet
from tools.gallery.pictures import BACKWARD, FORWARD, PICTURES, TIMELINES, busy, length, read
from tools.moves import Leg, draw, losses, run
from tools.on_paper import SIZES, Published, beside_published, between, of_plans
from tools.schedule.__main__ import main
from tools.schedule.figures import clock_table

MIB = 2**20


def pair(choice: Choice, predicted: float, measured: float | None) -> Pair:
    row = Row(choice, [], [Memory(parameters=10 * MIB)], lambda: StepTime(predicted), 8, None, 2, True)
    found = None if measured is None else Taken(measured, 11 * MIB, measured, 0.0)
    return Pair(MODELS["mlp, 6 of 1024"], 2, row, found, "ended" if found else "failed: no luck")


def judged() -> Judged:
    pairs = [
        pair(Choice("ddp", data=2), 0.1, 0.15),
        pair(Choice("fully_sharded", data=2), 0.11, 0.12),
        pair(Choice("pipeline_1f1b", 2, microbatches=4), 0.13, None),
        pair(Choice("pipeline_async", 2, microbatches=4), 0.08, 0.01),  # it is never chosen
    ]
    return Judged(MODELS["mlp, 6 of 1024"], 2, 3.0, pairs)


def test_a_choice_is_judged_by_the_fastest_that_could_be_chosen() -> None:
    found = judged()
    assert found.regret == pytest.approx(0.15 / 0.12)
    families, choices, rows = plan.tables([found])
    (family,) = families.records()
    assert family["chosen within 5 %"] == "0 of 1"
    assert family["memory off, worst"] == pytest.approx(0.1)
    assert choices.records()[0]["measured"] == "fully_sharded, 2 replicas"
    assert [row["how it ended"] for row in rows.records()] == ["ended", "ended", "failed: no luck", "ended"]


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    facts = {"processor": "a CPU", "cores": 2, "backend": "gloo", "versions": {}, "date": "today", "load": [0.0]}
    report.write(tmp_path, "plan", facts, plan.tables([judged()]))
    page, picture = tmp_path / "page.md", tmp_path / "plan.png"
    page.write_text("Before.\n<!-- tools.planned begins -->\nOld.\n<!-- tools.planned ends -->\nAfter.\n")
    planned.main([str(tmp_path / "plan.json"), str(page), str(picture)])
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "Old." not in text
    assert text.count("0 of 1") == 1 and "no luck" not in text and "a CPU, 2 cores" in text
    assert "(plan.png)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_becomes_a_picture(tmp_path: Path) -> None:
    table = rows(outcomes())
    report_of_comparison.write(tmp_path, ("", ""), table, [])
    found = comparison.read(tmp_path / "compare.csv")
    assert [(row.strategy, row.error) for row in found] == [(row.strategy, row.error) for row in table]
    assert (found[2].step, found[2].peaks, found[2].held) == (table[2].step, table[2].peaks, table[2].held)
    comparison.main([str(tmp_path / "compare.csv"), str(tmp_path / "bars.png")])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_written_into_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    monkeypatch.setitem(SIZES, "small", small)
    (plan,) = of_plans([("small", 2)])
    assert "### small on 2 H100" in plan and len([line for line in plan.splitlines() if "GiB" in line]) > 1
    text = "".join(beside_published([Published("small", "a100", 2, 4, 1234, "others")]))
    planned, again = (float(cell.replace(",", "")) for cell in text.splitlines()[-1].split("|")[3:5])
    assert again < planned and "1,234" in text
    page = between("a\n<!-- plans -->\nold\n<!-- end -->\nb", "plans", "new")
    assert page == "a\n<!-- plans -->\n\nnew\n\n<!-- end -->\nb"
    with pytest.raises(SystemExit, match="plans"):
        between("nothing", "plans", "new")


SMALL = ["data.batch_size=12", "data.context=16", "model.width=16", "model.heads=2", "trainer.limit_val_batches=1"]


@pytest.mark.thorough
def test_a_run_that_is_disturbed_and_moved_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    legs = [Leg("single", 0.3, signal.SIGKILL), Leg("pipeline_gpipe")]
    run(tmp_path / "alone", 48, [Leg("single")], SMALL)
    _, end = run(tmp_path / "moved", 48, legs, SMALL)
    whole, moved = losses(tmp_path / "alone"), losses(tmp_path / "moved")
    assert end == 48 and whole.keys() == moved.keys() == set(range(48))
    assert max(abs(moved[step] - whole[step]) for step in whole) < 1e-5


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    whole = {step: 3.0 - step / 10 for step in range(9)}
    legs = [Leg("single", 0.3, signal.SIGTERM), Leg("ddp", 0.6, signal.SIGKILL), Leg("fully_sharded")]
    draw(tmp_path / "moves.png", whole, whole, [3, 6, 9], legs)
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")


PAGES = ("README.md", "README.ko.md", "docs/index.md", "docs/strategies.md")


@pytest.mark.parametrize("name", TIMELINES)
def test_a_picture_shows_what_its_caption_says(name: str) -> None:
    assert unmet(name, read(PICTURES / f"{name}.svg")) == []


def test_the_pages_name_the_durations_and_the_share_of_the_time_in_which_stages_are_busy() -> None:
    rows = read(PICTURES / "async.svg")
    share = f"{sum(busy(row, length(rows)) for row in rows) / len(rows):.0%}"
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert "pictures/async.svg" in text
        assert share in text or f"{share[:-1]} %" in text, f"{page} doesn't say {share}"
    text = (ROOT / "docs" / "strategies.md").read_text()
    assert f"sleep {1000 * FORWARD:.0f} ms in the forward and {1000 * BACKWARD:.0f} ms in the backward" in text


def test_a_picture_of_something_else_is_not_taken() -> None:
    rows = read(PICTURES / "async.svg")
    (lacking,) = unmet("async", [[span for span in rows[0] if span.kind != "backward"], *rows[1:]])
    assert lacking.startswith("stage 0 has no forward or no backward")
    (idle,) = unmet("async", [[span for span in rows[0] if span.microbatch % 4], *rows[1:]])
    assert idle.startswith("the stages are busy")
    (short,) = unmet("async", [[replace(span, end=(span.start + span.end) / 2) for span in rows[0]], *rows[1:]])[:1]
    assert short.startswith("stage 0: a forward takes")
    assert unmet("gpipe", rows) and unmet("interleaved", rows)


# -- schedules -------------------------------------------------------------------------------------------------------


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
    # Latency is paid twice a microbatch, unless one more is in flight.
    ("async --stages 4 --microbatches 1 --updates 200 --forward 20 --backward 40 --latency 3", None,
     ["0.930 simulated in the steady state, 0.930 by theory"]),
    ("async --stages 4 --microbatches 1 --updates 60 --forward 20 --backward 40 --latency 30 --extra-in-flight 1", None,
     ["1.000 simulated in the steady state, 1.000 by theory"]),
])  # fmt: skip
def test_command_line_prints_table_bubble_activations_and_staleness(
    arguments: str, table: Any, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments.split())
    printed = capsys.readouterr().out
    assert table is None or clock_table(table) in printed
    assert all(each in printed for each in said), printed
