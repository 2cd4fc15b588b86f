"""The page of the documentation that shows the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools import pages
from tools.faults.faults import ANY, FAULTS
from tools.faults.training import Case
from tools.pages import about, made


def write(faulty: Sequence[Case], clean: Sequence[Case], file: Path) -> None:
    """Write the page.

    Args:
        faulty: those with a fault.
        clean: the same modules and layouts without any.
    """
    seconds = sum(each.seconds for each in (*faulty, *clean))
    counts = {
        "cases": len(faulty),
        "found": sum(each.is_found for each in faulty),
        "placed": sum(each.is_placed for each in faulty),
        "alike": sum(FAULTS[each.name or ""].unit == ANY for each in faulty),
        "clean": len(clean),
        "alarms": sum(not each.is_right for each in clean) or "no",
    }
    parts = [
        _INTRODUCTION.format(**counts),
        f"{made(about(), seconds)}.",
        "\n".join(_table(faulty)),
        _MODELS,
    ]
    pages.write(parts, file)


def _table(faulty: Sequence[Case]) -> Iterator[str]:
    yield "| Fault | Module, layout | Found | Begins in |"
    yield "|---|---|:-:|---|"
    for each in faulty:
        begins = None if each.comparison is None else each.comparison.beginning
        place = "" if begins is None else f"{begins.unit}, {begins.phase}"
        if not each.is_placed:
            place += " (wrong)" if begins else "not said"
        yield f"| {each.name} | {each.model}, {each.layout} | {'yes' if each.is_found else 'NO'} | {place} |"


_INTRODUCTION = """\
# Faults that check finds

`check` ([Is it right on my model?](check.md)) is itself tested by faults, seeded into the library one at a time on the
ranks of a layout. Some rebuild what was wrong in other frameworks. `make faults` runs all of them and writes this page;
a part runs with the tests.

- **Found**: the report says that the layout differs, and not by nature.
- **Begins in**: the unit that the report names, and when: in the *forward* (its input or its output differs), or in the
  *backward* (the gradient of one of both). Where what units get and return is right, it names the first parameter: its
  *gradient*, which is summed and averaged over ranks, or the *update*.

{found} of {cases} faults are found, and {placed} placed rightly. {alike} of them change all parameters alike: there any
unit is right. Without a fault, the same {clean} pairs of a module and a layout give {alarms} false alarms."""

_MODELS = """\
The modules are in tools/faults/models.py: four residual blocks (*Blocks*), with dropout (*Dropped*), with gradients
clipped by their norm (*Clipped*), or with a module between divided layers (*Scaled*); a language model with tied
embeddings (*Words*) or without (*Untied*); an encoder whose output every block reads (*Pictures*). The faults are in
tools/faults/faults.py, a few lines each. Where the library itself would refuse a fault in the first update, as it does
where tensor ranks come to different losses or gradients, that is switched off."""
