"""``python -m recipes.report FOLDER``: the runs in a folder, such as those of a sweep, side by side.

::

    python -m recipes.report logs/train/multiruns/2026-11-23_04-26-12-951180

It prints a table, and writes it as ``report.csv`` and as a picture. A sweep does this at its end; it may be done at any
time, while runs are still going on.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from recipes import record
from recipes.command_line import typed

CSV, PICTURE = "report.csv", "report.png"
_PRUNED = "pruned at"  # a status
_WIDE = 160  # characters: of a file
_BLUE, _GREY = "#0072B2", "#8A8A8A"


@dataclass(frozen=True)
class Run:
    """A row.

    Attributes:
        name: the folder of the run, seen from that of the report.
        status: ``completed``, ``failed``, ``pruned at`` a step and so on.
        choices: the overrides by which the runs differ.
        metrics: by name; none while the run goes on.
        seconds: from its start to its end; None while it goes on.
        attempts: how often its workers were started.
        optimized: the metric that the recipe is judged by.
        most_is_best: whether more of it is better.
    """

    name: str
    status: str
    choices: Mapping[str, str]
    metrics: Mapping[str, float | None]
    seconds: float | None
    attempts: int
    optimized: str | None
    most_is_best: bool

    @property
    def label(self) -> str:
        """The run in a word or two."""
        return " ".join(f"{key}={_shown(value)}" for key, value in self.choices.items()) or self.name

    def row(self) -> dict[str, Any]:
        """What the table has of it."""
        numbers = {"seconds": self.seconds, "attempts": self.attempts}
        return {"run": self.name, **self.choices, "status": self.status, **self.metrics, **numbers}


def runs(folder: Path) -> list[Run]:
    """The recorded runs in a folder and below it, in the order of their names."""
    found = {file.parent: record.read(file.parent) for file in sorted(folder.rglob(record.RUN), key=_in_order)}
    given = {path: _overrides(said) for path, said in found.items()}
    keys = dict.fromkeys(key for each in given.values() for key in each)
    direction = _direction_of_search(folder)
    differing = [key for key in keys if len({each.get(key) for each in given.values()}) > 1]
    return [
        Run(
            name=str(path.relative_to(folder)),
            status=_status(said),
            choices={key: given[path].get(key, "") for key in differing},
            metrics=said.get("metrics", {}),
            seconds=_seconds(said),
            attempts=len(said.get("attempts", [])),
            **_judgement(path, direction),
        )
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
    return f"{_PRUNED} {pruned}" if pruned is not None and status == "completed" else status


def _seconds(said: Mapping[str, Any]) -> float | None:
    if said.get("ended") is None:
        return None
    return (datetime.fromisoformat(said["ended"]) - datetime.fromisoformat(said["started"])).total_seconds()


def direction_of(metric: str) -> Literal["minimize", "maximize"] | None:
    """What is to become of a metric, as far as its name tells."""
    if any(word in metric for word in ("loss", "error", "perplexity")):
        return "minimize"
    return "maximize" if "acc" in metric else None


def _direction_of_search(folder: Path) -> str | None:
    """The one that a search was told; None for none."""
    try:
        sweep = yaml.safe_load((folder / "multirun.yaml").read_text())
        return sweep["hydra"]["sweeper"].get("direction")  # type: ignore[no-any-return]
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return None


def _judgement(folder: Path, direction: str | None) -> dict[str, Any]:
    """By which metric a run is judged, and how, as far as its config says it, or the search that it is of."""
    try:
        config = yaml.safe_load((folder / record.CONFIG).read_text())
    except (OSError, yaml.YAMLError):
        config = None
    config = config if isinstance(config, dict) else {}
    name = config.get("optimized_metric")
    savers = [node for node in config.get("callbacks", {}).values() if isinstance(node, dict)]
    modes = [node["mode"] for node in savers if node.get("monitor") == name and "mode" in node]
    told = direction or ("maximize" if "max" in modes else "minimize" if modes else direction_of(str(name)))
    return {"optimized": name, "most_is_best": told == "maximize"}


def report(folder: Path, console: Console | None = None) -> list[Run]:
    """Print the table, and write it and the picture into the folder. Returns the runs."""
    found = runs(folder)
    rows = [run.row() for run in found]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns, title=str(folder))
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    (console or Console(width=None if sys.stdout.isatty() else _WIDE)).print(table)
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    (folder / PICTURE).unlink(missing_ok=True)
    if any(_judged(found)):
        draw(found, folder / PICTURE)
    return found


def _shown(value: Any) -> str:
    """Short: a search tries numbers of many digits."""
    if isinstance(value, str) and re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", value):
        value = float(value)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _judged(found: Sequence[Run]) -> Iterator[tuple[str, str, float]]:
    """Of the runs that have the metric by which they are judged, label, metric and value."""
    for run in found:
        value = run.metrics.get(run.optimized) if run.optimized else None
        if run.optimized and value is not None and not run.status.startswith(_PRUNED):
            yield run.label, run.optimized, value


def draw(found: Sequence[Run], path: Path) -> None:
    """Points of the metric that the runs are judged by, a row a run; the best one in colour."""
    from matplotlib.figure import Figure

    labels, metrics, values = zip(*_judged(found), strict=True)
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(labels)), dpi=110, layout="constrained")
    panel = figure.subplots()
    best = max(values) if found[0].most_is_best else min(values)
    colours = [_BLUE if value == best else _GREY for value in values]
    panel.scatter(values, range(len(values)), c=colours, s=42, zorder=2)
    for place, value in enumerate(values):
        panel.annotate(f"{value:.4g}", (value, place), xytext=(7, 0), textcoords="offset points", va="center")
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.margins(x=0.15)
    panel.set_xlabel(metrics[0])
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.savefig(path)


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
