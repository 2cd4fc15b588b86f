"""Results in a file, written after each case, and those of the last runs, from which the page is made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tools.pages import about
from tools.torture.outcome import Verdict

RECORDED = Path(__file__).parent / "recorded.json"


@dataclass(slots=True)
class Results:
    """Verdicts by the names of their cases.

    Attributes:
        verdicts: of each case that was run.
        about: where and with what the last one ran.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=about)

    def write(self, file: Path) -> None:
        """A line for each case. Whole, or not at all."""
        lines = [f"{json.dumps(name)}: {json.dumps(asdict(self.verdicts[name]))}" for name in sorted(self.verdicts)]
        content = f'{{"about": {json.dumps(self.about)},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(content)
        new.replace(file)

    def add(self, later: Results) -> None:
        """Take results of the same matrix, of which some may be here already."""
        for name, verdict in later.verdicts.items():
            earlier = self.verdicts.get(name)
            again = earlier is not None and earlier.held == verdict.held
            self.verdicts[name] = replace(verdict, times=verdict.times + (earlier.times if earlier and again else 0))
        self.about = later.about

    @classmethod
    def read(cls, file: Path) -> Results:
        content = json.loads(file.read_text())
        return cls({name: Verdict(**verdict) for name, verdict in content["cases"].items()}, content["about"])
