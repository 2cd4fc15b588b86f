"""What a run of the zoo leaves: results, recorded outcomes, and the page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.zoo import page, registry
from tests.zoo.layouts import LAYOUTS
from tests.zoo.outcome import Outcome, Verdict
from tests.zoo.record import Results, complaints, record, recorded

FIRST, SECOND = LAYOUTS[0].name, LAYOUTS[1].name


def results(first: Outcome = Outcome.EQUAL, second: Outcome = Outcome.REFUSED) -> Results:
    made = Results()
    made.add("gpt2", FIRST, Verdict(first, deviation=1e-16), 1.0)
    made.add("gpt2", SECOND, Verdict(second, "layers='a|b' is wrong.\nMore.", math.inf), 2.0)
    made.add("bert", FIRST, None, 0.0)
    return made


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results().write(tmp_path / "zoo.json")
    assert Results.read(tmp_path / "zoo.json") == results()


def test_outcomes_are_recorded_beside_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    record(results(), file)
    other = Results()
    other.add("t5", FIRST, Verdict(Outcome.EQUAL), 1.0)
    record(other, file)
    assert recorded(file) == {
        "gpt2": {FIRST: Outcome.EQUAL, SECOND: Outcome.REFUSED},
        "bert": {},
        "t5": {FIRST: Outcome.EQUAL},
    }
    assert recorded(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("before", "now", "is_worse"),
    [
        (Outcome.EQUAL, Outcome.REFUSED, True),
        (Outcome.EQUAL, Outcome.BY_NATURE, True),
        (Outcome.REFUSED, Outcome.DIFFERENT, True),
        (Outcome.REFUSED, Outcome.EQUAL, False),
        (Outcome.CRASHED, Outcome.HANG, False),
        (None, Outcome.REFUSED, False),
        (None, Outcome.DIFFERENT, True),
    ],
)
def test_worse_than_recorded_is_a_complaint(before: Outcome | None, now: Outcome, is_worse: bool) -> None:
    earlier = {} if before is None else {"gpt2": {FIRST: before}}
    assert bool(complaints(results(now), earlier)) == is_worse


def test_the_page_shows_every_case_and_is_stable(tmp_path: Path) -> None:
    about = {"date": "2026-01-01", "machine": "2 cores", "torch": "2.13.0"}
    files = [tmp_path / "a.md", tmp_path / "b.md"]
    for file in files:
        page.write(results(), about, {"gpt2": "transformers", "bert": "transformers"}, file)
    text = files[0].read_text()
    assert text == files[1].read_text()
    assert "| gpt2 | = | r |" in text and "| equal | 1 | 0 |" in text
    assert rf"gpt2 ({SECOND}): layers='a\|b' is wrong." in text and "More." not in text


def test_every_module_with_entries_is_in_the_registry() -> None:
    folder = Path(registry.__file__).parent
    listed = {file for file in folder.rglob("*.py") if "\nENTRIES" in file.read_text()} - {folder / "faulty.py"}
    rooms = {folder.parent.parent / f"{room.replace('.', '/')}.py" for room in registry.ROOMS}
    assert rooms == listed


def test_the_zoo_has_models_enough_without_the_packages_of_its_own() -> None:
    assert len(registry.entries()) >= 80
