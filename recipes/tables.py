"""Tables of measurements for the terminal and for Markdown, and the machine that they were made on."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Measurements of one kind.

    Attributes:
        title: what was measured.
        columns: name of each column -> how its numbers are written, as in ``format``; ``""`` for text.
        rows: a cell a column; None is left blank.
        note: how to read it.
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Head and rows as text."""
        body = [
            ["" if cell is None else format(cell, spec) for cell, spec in zip(row, self.columns.values(), strict=True)]
            for row in self.rows
        ]
        return [list(self.columns), *body]

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.cells(), strict=True)]
        numeric = [bool(spec) for spec in self.columns.values()]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in self.cells()
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, "", lines[0], rule, *lines[1:], *(["", self.note] if self.note else [])])

    def markdown(self) -> str:
        head, *body = (f"| {' | '.join(row)} |" for row in self.cells())
        rule = "|".join(["", *("--:" if spec else "---" for spec in self.columns.values()), ""])
        return "\n".join([f"### {self.title}", "", head, rule, *body, *(["", self.note] if self.note else [])])

    def records(self) -> list[dict[str, Cell]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A line for each row, after one with the names of the columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def circumstances() -> dict[str, Any]:
    """Machine, versions and time: what a figure means nothing without."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load": [round(load, 2) for load in os.getloadavg()],  # of the last 1, 5, 15 minutes
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("torch", "lightning")},
        "backend": "gloo, one thread a process",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
