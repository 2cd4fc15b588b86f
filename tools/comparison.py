"""``python -m tools.comparison FOLDER/compare.csv PICTURE.png``: what ``recipes.compare`` has measured, as bars."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.compare.rows import Row
from recipes.compare.run import REFERENCE
from recipes.traffic import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20

# Okabe and Ito's palette, which readers of all kinds of colour vision tell apart; hatched too where colours meet again.
_BLUE, _ORANGE, _GREEN, _SKY, _PURPLE, _RED = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00"
_GREY = "#8A8A8A"
_HELD = {"parameters": (_BLUE, ""), "gradients": (_ORANGE, "////"), "optimizer": (_GREEN, "")}
_SENT = dict(
    zip(
        KINDS,
        [(_BLUE, ""), (_ORANGE, "////"), (_GREEN, ""), (_PURPLE, "...."), (_SKY, "xxxx"), (_RED, "")],
        strict=True,
    )
)
_SMALLEST = 1e-3  # MiB: less can't be seen

Part = Mapping[str, tuple[str, str]]  # name -> colour, hatch


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the picture; a strategy that was not measured has an empty row that says so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 2.4 + 0.42 * len(rows)), dpi=120, layout="constrained")
    panels = figure.subplots(1, 4, sharey=True, width_ratios=[1.15, 1, 1, 1])
    panels[0].set_yticks(range(len(rows)), [row.strategy for row in rows], fontsize=11)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    for panel in panels:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
    for place, row in enumerate(rows):
        if row.error is not None:
            panels[0].annotate("not measured", (0, place), xytext=(5, 0), textcoords="offset points", va="center")
    measured = {place: row for place, row in enumerate(rows) if row.error is None}
    _speed(panels[0], measured)
    _peaks(panels[1], measured)
    _stacked(panels[2], {place: row.held for place, row in measured.items()}, _HELD)
    _stacked(panels[3], {place: row.sent for place, row in measured.items()}, _SENT)
    _title(panels[2], "Kept on a rank (MiB)", "from step to step, the mean rank")
    _title(panels[3], "Sent by a rank in a step (MiB)", "on the wire, the mean rank")
    figure.suptitle(title, x=0.006, ha="left", fontweight="bold", fontsize=13)
    figure.savefig(path)


def _speed(panel: Axes, rows: Mapping[int, Row]) -> None:
    longest = 0.0
    for place, row in rows.items():
        first, median, third = (1e3 * seconds for seconds in row.quartiles)
        panel.barh(place, median, 0.64, color=_GREY if row.strategy == REFERENCE else _BLUE)
        panel.errorbar(
            median, place, xerr=[[median - first], [third - median]], color="black", capsize=3, linewidth=1.2
        )
        rate = (
            f"\n{row.tokens:,.0f} tokens/s" if row.tokens else f"\n{row.samples:,.0f} samples/s" if row.samples else ""
        )
        _label(panel, third, place, f"{median:.1f}{rate}")
        longest = max(longest, third)
    _room(panel, longest, 1.45)
    _title(panel, "Step (ms)", "median and quartiles")


def _peaks(panel: Axes, rows: Mapping[int, Row]) -> None:
    longest = 0.0
    for place, row in rows.items():
        panel.barh(place, row.peak / MIB, 0.64, color=_GREY if row.strategy == REFERENCE else _SKY)
        panel.plot([peak / MIB for peak in row.peaks], [place] * len(row.peaks), "|", color="black", markersize=13)
        balance = f"\nmax/mean {row.imbalance:.2f}" if len(row.peaks) > 1 else ""
        _label(panel, row.peak / MIB, place, f"{row.peak / MIB:.1f}{balance}")
        longest = max(longest, row.peak / MIB)
    _room(panel, longest, 1.45)
    _title(panel, "Peak memory (MiB)", "the fullest rank; a mark for each rank")


def _stacked(panel: Axes, rows: Mapping[int, Mapping[str, float]], parts: Part) -> None:
    longest, named = 0.0, set()
    for place, sizes in rows.items():
        left = 0.0
        for name, (colour, hatch) in parts.items():
            size = sizes.get(name, 0.0) / MIB
            if size > _SMALLEST:
                label = None if name in named else name
                panel.barh(
                    place,
                    size,
                    0.64,
                    left=left,
                    color=colour,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0.6,
                    label=label,
                )
                named.add(name)
            left += size
        _label(panel, left, place, f"{left:.2f}" if left > _SMALLEST else "0")
        longest = max(longest, left)
    _room(panel, longest, 1.2)
    if named:
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2, frameon=False, fontsize=9.5)


def _label(panel: Axes, x: float, place: int, text: str) -> None:
    panel.annotate(text, (x, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)


def _room(panel: Axes, longest: float, factor: float) -> None:
    """For the labels at the ends of the bars."""
    panel.set_xlim(0, (longest or 1.0) * factor)


def _title(panel: Axes, title: str, under: str) -> None:
    panel.set_title(title, loc="left", fontsize=11.5, fontweight="bold", pad=20)
    panel.annotate(under, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9.5)


def read(file: Path) -> list[Row]:
    """The rows that a comparison has written."""
    with file.open() as stream:
        return [_row(line) for line in csv.DictReader(stream)]


def _row(line: Mapping[str, str]) -> Row:
    if line["error"]:
        return Row(line["strategy"], line["error"])
    quartiles = ("step_first_quartile_s", "step_s", "step_third_quartile_s")
    first, median, third = (float(line[name]) for name in quartiles)
    return Row(
        line["strategy"],
        quartiles=(first, median, third),
        samples=float(line["samples_per_s"] or 0),
        tokens=float(line["tokens_per_s"] or 0),
        peaks=[float(peak) for peak in line["peak_bytes"].split()],
        held={name: float(line[f"{name}_bytes"]) for name in _HELD},
        sent={kind: float(line[f"sent_{kind}_bytes"]) for kind in KINDS},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.comparison", description="Draw a comparison as bars.")
    parser.add_argument("table", type=Path, help="compare.csv in the folder of a comparison")
    parser.add_argument("picture", type=Path, help="to be written")
    parser.add_argument("--title", default="")
    given = parser.parse_args(arguments)
    draw(read(given.table), given.title, given.picture)


if __name__ == "__main__":
    main()
