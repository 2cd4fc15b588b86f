"""The study's pictures: loss over updates and over simulated time, and every arm's distance to the synchronous one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tools.study import clock
from tools.study.arms import Arm
from tools.study.rows import Row
from tools.study.tables import NAMES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which readers of all kinds of colour vision tell apart; lines differ in dashes too.
_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
_DASHES = {"second_order": "-", "error_feedback": "--", None: ":"}
_LINEAR = 2  # % within which the distances' axis is linear; logarithmic beyond
_BEGIN = 0.2  # of the updates: what comes before is not shown, for all is steep there


def curves(rows: Mapping[Arm, Row], optimizers: Sequence[str], stages: int, unit: str, path: Path) -> None:
    """A column for each optimizer: above over updates, below over simulated time. ``unit``: of the loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(optimizers) + 2.4, 8.4), dpi=110, layout="constrained")
    panels = figure.subplots(2, len(optimizers), squeeze=False, sharey="col")
    labels: dict[str, Artist] = {}
    for column, optimizer in enumerate(optimizers):
        above, below = panels[0][column], panels[1][column]
        synchronous = rows[Arm(optimizer)].curve()
        total = synchronous[-1][0]
        whole = clock.synchronous("1f1b", stages, 2 * stages, total)
        for row in (row for arm, row in rows.items() if arm.optimizer == optimizer and arm.stages == stages):
            arm, style = row.arm, _style(row.arm)
            line = _draw(above, row.curve(), style)
            time = partial(clock.asynchronous, stages, arm.microbatches, schedule=arm.schedule)
            _draw(below, [(time(u) / whole, loss) for u, loss in row.curve()], style)
            labels.setdefault(row.name, line)
        for (schedule, name), dashes in zip(clock.NAMES.items(), ("-", "--"), strict=True):
            style = {"color": "black", "linestyle": dashes, "linewidth": 2.2}
            if schedule == "1f1b":
                _draw(above, synchronous, style)
            times = [(clock.synchronous(schedule, stages, 2 * stages, u) / whole, loss) for u, loss in synchronous]
            label = "synchronous (in time: 1F1B)" if schedule == "1f1b" else f"synchronous, {name}"
            labels.setdefault(label, _draw(below, times, style))
        for panel in (above, below):
            panel.axhline(synchronous[-1][1], color="#999999", linewidth=0.8)
            low = min(row.mean for arm, row in rows.items() if arm.optimizer == optimizer)
            panel.set_ylim(0.98 * low, 1.02 * next(loss for u, loss in synchronous if u >= _BEGIN * total))
        above.set_xlim(_BEGIN * total, total)
        below.set_xlim(left=_BEGIN * clock.asynchronous(stages, 2 * stages, total) / whole)
        above.set_title(NAMES[optimizer], loc="left", fontweight="bold")
        above.set_xlabel("updates")
        below.set_xlabel(f"simulated time; 1: the synchronous arm's by 1F1B, m={2 * stages}")
    for row_of_panels in panels:
        row_of_panels[0].set_ylabel(f"validation loss ({unit})")
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#E5E5E5", linewidth=0.6)
    figure.legend(list(labels.values()), list(labels), loc="outside right center", frameon=False)
    figure.suptitle(f"{stages} stages, mean over the seeds", x=0.006, ha="left", fontweight="bold")
    figure.savefig(path)


def _style(arm: Arm) -> dict[str, Any]:
    if arm.schedule != "1f1b":
        colour = _GREEN if arm.schedule == "vmin" else _SKY
    elif arm.weights == "2bw":
        colour = _PURPLE
    elif arm.microbatches == 1:
        colour = _RED if arm.weights == "stash" else "#8A8A8A"
    else:
        colour = _BLUE if arm.microbatches > arm.stages else _ORANGE
    return {"color": colour, "linestyle": _DASHES[arm.correction if isinstance(arm.correction, str) else None]}


def _draw(panel: Axes, points: Sequence[tuple[float, float]], style: Mapping[str, Any]) -> Artist:
    return panel.plot([x for x, _ in points], [y for _, y in points], **{"linewidth": 1.6, **style})[0]


def gaps(rows: Mapping[Arm, Row], optimizers: Sequence[str], path: Path) -> None:
    """A row for each arm, a dot for each seed and a bar at their mean."""
    from matplotlib.figure import Figure

    stages = sorted({arm.stages for arm in rows if not arm.synchronous}, reverse=True)
    least = min(gap for row in rows.values() for gap in row.gaps(rows[Arm(row.arm.optimizer)]).values())
    ticks = [*([-5] if least < -_LINEAR else []), -2, -1, 0, 1, 2, 5, 10, 20, 50]
    names = {p: list(dict.fromkeys(row.name for arm, row in rows.items() if arm.stages == p)) for p in stages}
    heights = [len(names[p]) + 1 for p in stages]
    size = (4.6 * len(optimizers) + 2.2, 1.1 + 0.34 * sum(heights))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(
        len(stages), len(optimizers), squeeze=False, sharex=True, sharey="row", height_ratios=heights
    )
    for line, p in enumerate(stages):
        panels[line][0].set_yticks(range(len(names[p])), names[p])
        panels[line][0].set_ylim(len(names[p]) - 0.4, -0.6)
        panels[line][0].set_ylabel(f"{p} stages", fontweight="bold")
        for column, optimizer in enumerate(optimizers):
            panel = panels[line][column]
            for arm, row in rows.items():
                if arm.stages == p and arm.optimizer == optimizer:
                    _dots(panel, names[p].index(row.name), row, rows[Arm(optimizer)])
            panel.set_xscale("symlog", linthresh=_LINEAR)
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
            panel.axvline(0, color="black", linewidth=1)
            panel.grid(axis="x", color="#E5E5E5", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.tick_params(axis="y", length=0)
            if line == 0:
                panel.set_title(NAMES[optimizer], loc="left", fontweight="bold")
            if line == len(stages) - 1:
                panel.set_xlabel(f"above the synchronous loss (%; logarithmic beyond {_LINEAR})")
    figure.savefig(path)


def _dots(panel: Axes, place: int, row: Row, synchronous: Row) -> None:
    found = [gap for gap in row.gaps(synchronous).values() if isfinite(gap)]
    colour = _style(row.arm)["color"]
    panel.plot(found, [place] * len(found), "o", color=colour, markersize=5, alpha=0.75, markeredgewidth=0)
    if found:
        panel.plot([fmean(found)], [place], "|", color="black", markersize=13, markeredgewidth=1.6)
    if len(found) < len(row.finals):
        panel.annotate("diverged", (1, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8)
