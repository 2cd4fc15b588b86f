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
_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00", "#F0E442", "#000000", "#8A8A8A", "#7A5195"
)  # fmt: skip
_MARKS = "osD^vP*Xhp"
_PANELS = (("MiB", "tensors on the fullest rank"), ("ms", "step"))


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What was measured against what was predicted: memory, and time. Hollow marks are of more than two ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    ended = [row for row in rows if row["measured (ms)"] is not None]
    families = [*dict.fromkeys(_family(row) for row in ended)]
    for panel, (unit, what) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for number, family in enumerate(families):
            look = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKS[number % len(_MARKS)], "markersize": 4}
            for row in (row for row in ended if _family(row) == family):
                fill = "full" if row["ranks"] <= 2 else "none"
                panel.plot(row[f"predicted ({unit})"], row[f"measured ({unit})"], fillstyle=fill, **look)
            panel.plot([], [], linestyle="", label=family, **look)
        ends = [f(row[f"predicted ({unit})"] for row in ended) for f in (min, max)]
        panel.plot(ends, ends, color="#8A8A8A", linewidth=1)
        for off in (0.8, 1.2):
            panel.plot(ends, [off * end for end in ends], color="#8A8A8A", linewidth=0.8, linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#DDDDDD", linewidth=0.6)
        panel.set_xlabel(f"{what}, predicted ({unit})")
        panel.set_ylabel(f"{what}, measured ({unit})")
    figure.axes[0].set_title("Hollow: four ranks on two cores. Dotted: 20 % off", loc="left")
    figure.axes[0].legend(frameon=False, fontsize=9)
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
