"""What a run of the zoo leaves: results, recorded outcomes, and the page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tools.zoo import registry
from tools.zoo.layouts import LAYOUTS
from tools.zoo.outcome import Outcome, Verdict
from tools.zoo.record import Results, complaints

FIRST, SECOND = LAYOUTS[0].name, LAYOUTS[1].name


def results(first: Outcome = Outcome.EQUAL, second: Outcome = Outcome.REFUSED) -> Results:
    made = Results()
    made.add("gpt2", FIRST, Verdict(first, deviation=1e-16), 1.0)
    made.add("gpt2", SECOND, Verdict(second, "layers='a|b' is wrong.\nMore.", math.inf), 2.0)
    made.add("bert", FIRST, None, 0.0)
    return made


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


def test_every_module_with_entries_is_in_the_registry() -> None:
    folder = Path(registry.__file__).parent
    listed = {file for file in folder.rglob("*.py") if "\nENTRIES" in file.read_text()}
    rooms = {folder.parent.parent / f"{room.replace('.', '/')}.py" for room in registry.ROOMS}
    assert rooms == listed


def test_the_zoo_has_models_enough_without_the_packages_of_its_own() -> None:
    assert len(registry.entries()) >= 80
