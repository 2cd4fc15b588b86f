"""Writes a recorded run as a picture, for which matplotlib is imported, and as a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parallel.timeline.recording import COMPUTE, PASSES, Span, report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's palette: readers with any kind of colour vision can tell the colours apart.
_LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": "#0072B2", "edgecolor": "white", "linewidth": 0.4},
    "backward": {"facecolor": "#E69F00", "edgecolor": "white", "linewidth": 0.4},
    "backward input": {"facecolor": "#D55E00", "edgecolor": "white", "linewidth": 0.4},
    "backward weight": {"facecolor": "#009E73", "edgecolor": "white", "linewidth": 0.4},
    "step": {"facecolor": "#222222"},
    "evaluate": {"facecolor": "#56B4E9", "edgecolor": "white", "linewidth": 0.4},
    "receive": {"facecolor": "#F7F7F7", "edgecolor": "#CCCCCC", "hatch": "/////", "linewidth": 0},
}
_TEXT_COLOURS = {
    "forward": "white", "backward": "black", "backward input": "white", "backward weight": "white", "evaluate": "black"
}  # fmt: skip
_LIGHTER = 0.45  # of a later chunk: so much of its colour is white, and its numbers are black
_LEGIBLE = 100  # forwards and backwards that a row can show


def draw(
    rows: Sequence[Sequence[Span]],
    path: str | Path,
    *,
    title: str,
    theory: float | None,
    labels: Sequence[str] | None = None,
    said: str | None = None,
    width: float = 14,
) -> None:
    """Draw the timeline into a file, of the kind that the end of its name says: a row for each stage, a box for each
    span, with the number of its microbatch where it fits.

    Of a long run the beginning is drawn. Where a stage has several chunks, later ones are lighter.

    Args:
        title: the text above, before the :func:`report` of the whole run.
        theory: the theoretical bubble, for :func:`report`.
        labels: the names of the rows; by default "stage 0" and so on.
        said: a line in the place of the report, of spans that weren't recorded.
        width: the picture's width in inches. Text has the same size in all pictures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no forward or backward was recorded.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    told = report(rows, theory) if said is None else said
    begin, end = _window(rows)
    figure = Figure(figsize=(width, 1.5 + 0.45 * len(rows)), dpi=150, layout="constrained")
    panel = figure.subplots()
    panel.set_xlim(0, (end - begin) * 1e3)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlabel("time (ms)")
    panel.set_yticks(range(len(rows)), labels or [f"stage {s}" for s in range(len(rows))])
    panel.set_title(title, loc="left", fontweight="bold", pad=20)
    panel.annotate(told, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points")
    drawn = {span.kind for row in rows for span in row}
    legend = [
        Patch(label="waiting for a message" if kind == "receive" else kind, **look)
        for kind, look in _LOOKS.items()
        if kind in drawn
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.draw_without_rendering()  # lays out, so that a box's width is known
    _draw(panel, rows, begin, end)
    figure.savefig(path)


def _window(rows: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """The times to draw: the whole run, or the beginning of a long one, up to an update."""
    computed = [span for row in rows for span in row if span.kind in COMPUTE]
    begin, end = min(span.start for span in computed), max(span.end for span in computed)
    passes = [[span.end for span in row if span.kind in PASSES] for row in rows]
    if max(map(len, passes)) <= _LEGIBLE:
        return begin, end
    last = max(ends[:_LEGIBLE][-1] for ends in passes if ends)
    updates = zip(*([span.end for span in row if span.kind == "step"] for row in rows), strict=False)
    return begin, max((time for time in map(max, updates) if time <= last), default=last)


def _draw(panel: Axes, rows: Sequence[Sequence[Span]], begin: float, end: float) -> None:
    """Draw the boxes and numbers between two times. The panel's limits and layout are set."""
    points = panel.get_window_extent().width / panel.figure.dpi * 72 / (end - begin)  # a second

    def fitting_size(span: Span) -> float:
        width = min(span.end, end) - max(span.start, begin)
        return (points * width - 2) / (0.64 * len(str(span.microbatch)))  # a digit is 0.64 em wide

    shown = [[span for span in row if span.end > begin and span.start < end] for row in rows]
    for kind, look in _LOOKS.items():
        sizes = sorted(fitting_size(span) for row in shown for span in row if span.kind == kind)
        # One size for all numbers of a kind, at which most of them fit.
        size = min(9.0, sizes[len(sizes) // 10]) if sizes else 0.0
        for s, row in enumerate(shown):
            spans = [span for span in row if span.kind == kind]
            for chunk in sorted({span.chunk for span in spans}):
                bars = [
                    (1e3 * (span.start - begin), 1e3 * (span.end - span.start)) for span in spans if span.chunk == chunk
                ]
                shaded = look if chunk == 0 or kind == "receive" else {**look, "facecolor": _lighter(look, chunk)}
                panel.broken_barh(bars, (s - 0.4, 0.8), zorder=1 if kind == "receive" else 2, **shaded)
            for span in spans if kind in _TEXT_COLOURS and size >= 5 else ():
                if fitting_size(span) >= 0.9 * size:
                    middle = ((max(span.start, begin) + min(span.end, end)) / 2 - begin) * 1e3
                    colour = "black" if span.chunk else _TEXT_COLOURS[kind]
                    style: dict[str, Any] = {"fontsize": size, "color": colour}
                    panel.text(middle, s, str(span.microbatch), ha="center", va="center_baseline", **style)


def _lighter(look: dict[str, Any], chunk: int) -> tuple[float, ...]:
    """The lighter colour of a stage's later chunk."""
    from matplotlib.colors import to_rgb

    kept = (1 - _LIGHTER) ** chunk
    return tuple(1 - kept * (1 - part) for part in to_rgb(look["facecolor"]))


def write_trace(rows: Sequence[Sequence[Span]], path: str | Path, *, labels: Sequence[str]) -> None:
    """Write the recording for Perfetto, https://ui.perfetto.dev, in Chrome's trace format: a thread for each row, whose
    names are ``labels``."""
    begin = min((span.start for row in rows for span in row), default=0.0)
    events: list[dict[str, object]] = []
    for s, (row, label) in enumerate(zip(rows, labels, strict=True)):
        thread = {"pid": 0, "tid": s}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": label}, **thread})
        events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": s}, **thread})
        for span in row:
            arguments = {"update" if span.kind == "step" else "microbatch": span.microbatch}
            if span.chunk:
                arguments["chunk"] = span.chunk
            if span.version is not None:
                arguments["version"] = span.version
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.kind} {span.microbatch}",
                    "cat": span.kind,
                    "ts": (span.start - begin) * 1e6,  # microseconds
                    "dur": (span.end - span.start) * 1e6,
                    "args": arguments,
                    **thread,
                }
            )
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
