"""tools/planned.py: what was measured of plans becomes a section of a page, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.step_time import StepTime
from lightning_parallel.planning.table import Row
from tools.bench import plan, report
from tools.bench.plan import Judged, Pair, Taken
from tools.bench.plan_models import MODELS
from tools.planned import main

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
    for _ in range(2):
        main([str(tmp_path / "plan.json"), str(page), str(picture)])
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "Old." not in text
    assert text.count("0 of 1") == 1 and "no luck" not in text and "a CPU, 2 cores" in text
    assert "(plan.png)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    page.write_text("No place.")
    with pytest.raises(ValueError, match="no place"):
        main([str(tmp_path / "plan.json"), str(page), str(picture)])
