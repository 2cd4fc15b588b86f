"""``python -m tools.planned FOLDER/plan.json docs/which-layout.md PICTURE.png``: what ``tools.bench plan`` has found,
in the page's tables and as a picture."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.pages import replaced

_BEGIN, _END = "<!-- tools.planned begins -->", "<!-- tools.planned ends -->"
_TABLES = ("What a plan says, and what was measured", "The layout that a plan takes, and the fastest", "Each layout")

# Okabe and Ito's palette, with a mark for each family too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00", "#F0E442", "#000000", "#8A8A8A")
_MARKS = "osD^vP*Xh"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time against memory: from what was predicted a line leads to what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    families = list(dict.fromkeys(_family(row) for row in rows))
    for number, family in enumerate(families):
        own = [row for row in rows if _family(row) == family and row["measured (ms)"] is not None]
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        for row in own:
            times, sizes = ([row[f"{kind} ({unit})"] for kind in ("predicted", "measured")] for unit in ("ms", "MiB"))
            left.plot(times, sizes, color=colour, linewidth=0.7, alpha=0.6)
            left.plot(times[1], sizes[1], mark, color=colour, markersize=4)
            left.plot(times[0], sizes[0], mark, color=colour, markersize=4, fillstyle="none")
            right.plot(times[0], times[1], mark, color=colour, markersize=4, label=family if row is own[0] else None)
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#DDDDDD", linewidth=0.6)
    left.set_xlabel("step (ms)")
    left.set_ylabel("tensors on the fullest rank (MiB)")
    left.set_title("Each layout: hollow as predicted, filled as measured", loc="left")
    ends = [f(row["predicted (ms)"] for row in rows) for f in (min, max)]
    right.plot(ends, ends, color="#8A8A8A", linewidth=1)
    for off in (0.8, 1.2):
        right.plot(ends, [off * end for end in ends], color="#8A8A8A", linewidth=0.8, linestyle=":")
    right.set_xlabel("step, predicted (ms)")
    right.set_ylabel("step, measured (ms)")
    right.set_title("Dotted: 20 % off", loc="left")
    right.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _family(row: Mapping[str, Any]) -> str:
    return str(row["model"]).partition(",")[0]


def section(markdown: str, picture: str) -> str:
    """The first two tables of a measurement, a picture, and where it was made."""
    head, *parts = markdown.split("### ")
    found = [part.partition("\n") for title in _TABLES[:2] for part in parts if part.startswith(title)]
    tables = [f"**{title}**\n{rest}" for title, _, rest in found]
    return "\n".join([*tables, f"![Each layout: predicted and measured]({picture})\n", head.strip()])


def put(page: Path, text: str) -> None:
    """Write a section between its marks in a page."""
    page.write_text(replaced(page.read_text(), _BEGIN, _END, text.strip()))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.planned", description="Show how good plans are.")
    parser.add_argument("measured", type=Path, help="plan.json, as tools.bench writes it beside plan.md")
    parser.add_argument("page", type=Path, help="whose section is replaced")
    parser.add_argument("picture", type=Path, help="to be written")
    given = parser.parse_args(arguments)
    tables = {table["title"]: table["rows"] for table in json.loads(given.measured.read_text())["tables"]}
    draw(tables[_TABLES[2]], given.picture)
    picture = os.path.relpath(given.picture, given.page.parent)
    put(given.page, section(given.measured.with_suffix(".md").read_text(), picture))


if __name__ == "__main__":
    main()
