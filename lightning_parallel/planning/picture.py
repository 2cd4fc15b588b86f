"""Draws a plan: memory against time, and the best schedule. matplotlib is imported for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parallel.schedules.actions import OnChunk
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.timeline import picture
from lightning_parallel.timeline.recording import SPAN_NAMES, Span

if TYPE_CHECKING:
    from lightning_parallel.planning.table import Row

_MIB = 2**20


def draw(rows: Sequence[Row], limit: float | None, path: str | Path) -> None:
    """Draw into a file, of the kind that the end of its name says. Each layout is a point, and those which no other one
    beats in both time and memory are joined.

    Args:
        rows: that fit.
        limit: the bytes that a layout may take; None for no limit.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    panel = figure.subplots()
    panel.spines[["top", "right"]].set_visible(False)
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
    figure.savefig(path)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The layouts that no other one beats in both time and memory, the fastest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.memory.total)):
        if not found or row.memory.total < found[-1].memory.total:
            found.append(row)
    return found


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.memory.total / _MIB for row in rows], [1e3 * row.seconds for row in rows]


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
            Span(SPAN_NAMES[type(a)], a.microbatch, timed.start, timed.end, chunk=own[stage].index(a.chunk))
            for timed in timeline
            if isinstance(a := timed.action, OnChunk)
        ]
        for stage, timeline in enumerate(found.rows)
    ]
    title = f"{choice}, {choice.microbatches} microbatches"
    said = f"by plan, with messages that take no time: bubble {found.bubble:.1%}"
    picture.draw(spans, path, title=title, theory=None, said=said)
