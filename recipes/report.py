"""``python -m recipes.report FOLDER``: the runs in a folder, such as those of a sweep, side by side.

::

    python -m recipes.report logs/train/multiruns/2026-11-23_04-26-12-951180

It prints a table, and writes it as ``report.csv``. A sweep does this at its end; it may be done at any
time, while runs are still going on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from recipes import record
from recipes.command_line import typed
from recipes.tables import Table, write_csv

CSV = "report.csv"

Row = dict[str, Any]  # by column


def rows(folder: Path) -> list[Row]:
    """The recorded runs in a folder and below it, in the order of their names: the overrides by which they differ, how
    they ended, their metrics, seconds and attempts."""
    found = {file.parent: record.read(file.parent) for file in sorted(folder.rglob(record.RUN), key=_in_order)}
    given = {path: _overrides(said) for path, said in found.items()}
    keys = dict.fromkeys(key for each in given.values() for key in each)
    differing = [key for key in keys if len({each.get(key) for each in given.values()}) > 1]
    return [
        {
            "run": str(path.relative_to(folder)),
            **{key: given[path].get(key, "") for key in differing},
            "status": _status(said),
            **said.get("metrics", {}),
            "seconds": _seconds(said),
            "attempts": len(said.get("attempts", [])),
        }
        for path, said in found.items()
        if said
    ]


def _in_order(file: Path) -> list[tuple[int, str]]:
    """So that 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (sys.maxsize, part) for part in file.parts]


def _overrides(said: Mapping[str, Any]) -> dict[str, str]:
    pairs = (word.lstrip("+~").partition("=") for word in said.get("overrides") or [])
    return {key: value for key, _, value in pairs if not value.startswith("{")}  # nor fits a whole node a table


def _status(said: Mapping[str, Any]) -> str:
    """A pruned run is complete, but not comparable."""
    pruned, status = said.get("pruned_at"), str(said.get("status", ""))
    return f"pruned at {pruned}" if pruned is not None and status == "completed" else status


def _seconds(said: Mapping[str, Any]) -> float | None:
    if said.get("ended") is None:
        return None
    return (datetime.fromisoformat(said["ended"]) - datetime.fromisoformat(said["started"])).total_seconds()


def direction_of(metric: str) -> Literal["minimize", "maximize"] | None:
    """What is to become of a metric, as far as its name tells."""
    if any(word in metric for word in ("loss", "error", "perplexity")):
        return "minimize"
    return "maximize" if "acc" in metric else None


def report(folder: Path) -> list[Row]:
    """Print the table, and write it into the folder. Returns its rows."""
    found = rows(folder)
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = [[_shown(row.get(column)) for column in columns] for row in found]
    print(Table(str(folder), dict.fromkeys(columns, ""), cells).text())
    write_csv(folder / CSV, columns, found)
    return found


def _shown(value: Any) -> str:
    """Short: a search tries numbers of many digits."""
    if isinstance(value, str) and re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", value):
        value = float(value)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class AtTheEnd(Callback):
    """Hydra's callback: reports a sweep when its last job has ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        if any(folder.rglob(record.RUN)):
            report(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=typed("report"), description="The runs in a folder, side by side.")
    parser.add_argument("folder", type=Path, help="of a sweep, or with runs")
    given = parser.parse_args(arguments)
    if not any(given.folder.rglob(record.RUN)):
        sys.exit(f"{given.folder} has no runs: no {record.RUN} in it or below it")
    report(given.folder)


if __name__ == "__main__":
    main()
