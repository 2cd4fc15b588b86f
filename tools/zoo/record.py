"""Results in a file, written after each case, and the outcomes that an earlier run has recorded."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.pages import about
from tools.zoo.outcome import Outcome, Verdict

RECORDED = Path(__file__).parent / "recorded.json"
PACKAGES = ("transformers", "torchvision", "timm", "diffusers", "peft")


@dataclass(slots=True)
class Results:
    """Verdicts by entry and layout. A verdict of None: the layout has more stages than the entry has layers."""

    verdicts: dict[str, dict[str, Verdict | None]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, entry: str, layout: str, verdict: Verdict | None, seconds: float) -> None:
        self.verdicts.setdefault(entry, {})[layout] = verdict
        self.seconds += seconds

    def write(self, file: Path) -> None:
        """Whole, or not at all: what is read while it is written is what was there before."""
        cases = {
            entry: {layout: verdict and asdict(verdict) for layout, verdict in of_layouts.items()}
            for entry, of_layouts in self.verdicts.items()
        }
        new = file.with_suffix(".new")
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({"about": about(*PACKAGES), "seconds": self.seconds, "cases": cases}, indent=1))
        os.replace(new, file)

    @classmethod
    def read(cls, file: Path) -> Results:
        data = json.loads(file.read_text())
        verdicts = {
            entry: {
                layout: verdict and Verdict(Outcome(verdict.pop("outcome")), **verdict)
                for layout, verdict in of_layouts.items()
            }
            for entry, of_layouts in data["cases"].items()
        }
        return cls(verdicts, data["seconds"])


def recorded(file: Path = RECORDED) -> dict[str, dict[str, Outcome]]:
    """The outcomes that a run has recorded, by entry and layout; none if there is no such file."""
    if not file.exists():
        return {}
    read = json.loads(file.read_text())
    return {entry: {layout: Outcome(said) for layout, said in cases.items()} for entry, cases in read.items()}


def record(results: Results, file: Path = RECORDED) -> None:
    """Keep the outcomes of a run, beside those of entries that it left out. A line for each entry."""
    outcomes = recorded(file)
    for entry, cases in results.verdicts.items():
        found = {layout: verdict.outcome for layout, verdict in cases.items() if verdict is not None}
        outcomes[entry] = outcomes.get(entry, {}) | found
    lines = [f"{json.dumps(entry)}: {json.dumps(outcomes[entry])}" for entry in sorted(outcomes)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def complaints(results: Results, before: dict[str, dict[str, Outcome]]) -> list[str]:
    """The cases that are worse than recorded, or wrong and not recorded."""
    found = []
    for entry, cases in results.verdicts.items():
        for layout, verdict in cases.items():
            if verdict is None:
                continue
            earlier = before.get(entry, {}).get(layout)
            if verdict.outcome.is_worse_than(earlier or Outcome.REFUSED):
                found.append(f"{entry}, {layout}: {verdict.outcome}, not {earlier or 'recorded'}: {verdict.detail}")
    return found
