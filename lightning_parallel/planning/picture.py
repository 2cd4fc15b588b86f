"""Draws a plan: memory against time, and what a step's time consists of. matplotlib is imported for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parallel.planning.step_time import PARTS
from lightning_parallel.schedules.actions import OnChunk
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.timeline import picture
from lightning_parallel.timeline.recording import KINDS, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightning_parallel.planning.table import Row

# Okabe and Ito's palette: readers with any kind of colour vision can tell the colours apart.
_COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#8A8A8A")  # of the parts of a step's time
_MIB = 2**20


def draw(rows: Sequence[Row], best_of_each: Sequence[Row], limit: float | None, path: str | Path) -> None:
    """Draw into a file, of the kind that the end of its name says. On the left each layout is a point, and those which
    no other one beats in both time and memory are joined. On the right the best of each layout is a bar.

    Args:
        rows: that fit.
        best_of_each: some of them, which get bars.
        limit: the bytes that a layout may take; None for no limit.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.6 + 0.36 * max(10, len(best_of_each))), dpi=120, layout="constrained")
    points, bars = figure.subplots(1, 2)
    for panel in (points, bars):
        panel.spines[["top", "right"]].set_visible(False)
    _draw_points(points, rows, limit)
    _draw_bars(bars, best_of_each)
    figure.savefig(path)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The layouts that no other one beats in both time and memory, the fastest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.memory.total)):
        if not found or row.memory.total < found[-1].memory.total:
            found.append(row)
    return found


def _draw_points(panel: Axes, rows: Sequence[Row], limit: float | None) -> None:
    on_time = [row for row in rows if not row.choice.is_late]
    late = [row for row in rows if row.choice.is_late]
    for some, colour, label in ((on_time, "#56B4E9", "layouts"), (late, "#BBBBBB", "with late gradients")):
        if some:
            panel.plot(*_places(some), "o", markersize=4, color=colour, label=label)
    best = frontier(on_time)
    panel.plot(*_places(best), "o-", markersize=5, color="#0072B2", label="no other is faster and smaller")
    for row, offset, side in ((best[0], (-6, -12), "right"), (best[-1], (6, 4), "left"))[: len(best)]:
        place = row.memory.total / _MIB, 1e3 * row.seconds
        panel.annotate(str(row.choice), place, xytext=offset, textcoords="offset points", ha=side, fontsize=8)
    if limit is not None:
        panel.axvline(limit / _MIB, color="#D55E00", linewidth=1, label="the limit, less the margin")
    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    panel.set_xlabel("memory of the fullest rank (MiB)")
    panel.set_ylabel("step (ms)")
    panel.legend(loc="upper right", fontsize=8, framealpha=1, edgecolor="white")


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.memory.total / _MIB for row in rows], [1e3 * row.seconds for row in rows]


def _draw_bars(panel: Axes, rows: Sequence[Row]) -> None:
    begins = [0.0] * len(rows)
    for (part, words), colour in zip(PARTS.items(), _COLOURS, strict=True):
        widths = [1e3 * getattr(row.time, part) for row in rows]
        if any(widths):
            panel.barh(range(len(rows)), widths, left=begins, color=colour, label=words)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    ran = [(number, 1e3 * row.seconds) for number, row in enumerate(rows) if row.measured is not None]
    if ran:
        panel.plot([ms for _, ms in ran], [number for number, _ in ran], "D", color="black", label="measured")
    panel.set_yticks(range(len(rows)), [str(row.choice) for row in rows], fontsize=8)
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.set_xlabel("step (ms), predicted")
    panel.legend(frameon=False, fontsize=8)


def draw_schedule(row: Row, path: str | Path) -> None:
    """Draw when the stages of a pipeline compute in a step, with the times of their chunks. Messages take none.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
    """
    choice, chunks = row.choice, row.chunks
    forward, backward = [chunk.forward for chunk in chunks], [chunk.backward for chunk in chunks]
    found = simulate(choice.order().schedule, forward, backward, first=[chunk.first for chunk in chunks])
    own = [choice.chunks_of(stage) for stage in range(choice.stages)]
    spans = [
        [
            Span(KINDS[type(t.action)], t.action.microbatch, t.start, t.end, chunk=own[stage].index(t.action.chunk))
            for t in timed
            if isinstance(t.action, OnChunk)
        ]
        for stage, timed in enumerate(found.rows)
    ]
    title = f"{choice}, {choice.microbatches} microbatches"
    said = f"by plan, with messages that take no time: bubble {found.bubble:.1%}"
    picture.draw(spans, path, title=title, theory=None, said=said)
