"""planning/picture.py and a plan's records: what a table can't show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_parallel import plan
from lightning_parallel.comparison.timing import Measured
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.picture import frontier
from lightning_parallel.planning.table import Plan
from tools.faults.models import Blocks


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(Blocks(), Blocks.batches()[0], devices=4, device="h100", memory="3GiB")


def test_no_layout_beats_those_of_the_frontier(found: Plan) -> None:
    best = frontier(found.rows)
    assert best[0].seconds == min(row.seconds for row in found.rows)
    assert best[-1].memory.total == min(row.memory.total for row in found.rows)
    for one in best:
        others = [row for row in found.rows if row.seconds < one.seconds and row.memory.total <= one.memory.total]
        assert not others


def test_records_have_what_the_table_has(found: Plan) -> None:
    records = found.records()
    assert len(records) == len(found.found)
    for record, row in zip(records, found.found, strict=True):
        assert (record["layout"], record["fits"], record["bytes"]) == (str(row.choice), row.fits, row.memory.total)
        assert sum(v for k, v in record.items() if k.endswith("_bytes")) == row.memory.total
        if row.fits:
            parts = sum(v for k, v in record.items() if k.endswith("_seconds"))
            assert parts == pytest.approx(row.seconds) == record["seconds"]
    assert {record["seconds"] is None for record in records if not record["fits"]} == {True}
    assert [record["verdict"] for record in records].count("best") == 1


def test_a_plan_is_drawn(found: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert found.best.choice.stages == 1
    found.draw(tmp_path / "one.png")
    assert [file.name for file in tmp_path.iterdir()] == ["one.png"]
    small = replace(found.best, ranks=[Memory()], measured=Measured(1e-3, 1))
    pipeline = next(row for row in found.rows if row.choice.stages > 1 and not row.choice.is_late)
    replace(found, found=[pipeline, small, *found.found]).draw(tmp_path / "two.svg")
    assert {file.name for file in tmp_path.iterdir()} == {"one.png", "two.svg", "two_schedule.svg"}


def test_what_does_not_fit_is_not_drawn(found: Plan, tmp_path: Path) -> None:
    nothing = replace(found, found=[replace(row, fits=False) for row in found.found])
    with pytest.raises(ValueError, match="no layout"):
        nothing.draw(tmp_path / "none.png")
    assert {record["verdict"].split()[0] for record in nothing.records()} == {"needs"}
