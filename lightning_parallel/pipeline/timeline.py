"""What ran when: recorded on each rank, measured against theory, and drawn.

A row is what one stage recorded, a list of `Span` in the order of time. Rows can be compared where the ranks
share a clock, as the processes of one host share `time.monotonic`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightning_parallel.pipeline.schedule import Step
from lightning_parallel.pipeline.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE = frozenset({"forward", "backward", "step"})
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did for one microbatch (for a step: the number of the update).

    `kind` is "forward", "backward" or "step" (computing), "receive" (waiting for a message), "send",
    "evaluate" (validation, test, prediction), or "omitted" (recording that was dropped). `start` and `end`
    are in seconds. Computing spans of a row do not overlap. `version` is the number of updates that made the weights
    of an asynchronous pipeline's forward.
    """

    kind: str
    microbatch: int
    start: float
    end: float
    version: int | None = None


class Timeline:
    """Recorder of one rank's spans.

    A long run keeps its first and its last `limit` spans; an "omitted" span stands for what was between.

        timeline = Timeline(enabled=True)
        with timeline.span("forward", microbatch):
            ...
    """

    def __init__(self, enabled: bool, limit: int = 20_000) -> None:
        self.enabled = enabled
        self._limit = limit
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=limit)
        self._omitted_from: float | None = None

    def span(self, kind: str, microbatch: int, version: int | None = None) -> AbstractContextManager[None]:
        """Record what runs in the `with` block; if it raises, too. Costs next to nothing when disabled."""
        return _Recording(self, kind, microbatch, version) if self.enabled else _NOTHING

    @property
    def spans(self) -> list[Span]:
        """What was recorded, in the order in which it ended."""
        if self._omitted_from is None:
            return [*self._first, *self._last]
        return [*self._first, Span("omitted", -1, self._omitted_from, self._last[0].start), *self._last]

    def _add(self, span: Span) -> None:
        if len(self._first) < self._limit:
            self._first.append(span)
            return
        if len(self._last) == self._limit and self._omitted_from is None:
            self._omitted_from = self._first[-1].end
        self._last.append(span)


class _Recording:
    """One `with timeline.span(...)`; a class, since `contextlib.contextmanager` costs several times more."""

    __slots__ = ("_kind", "_microbatch", "_start", "_timeline", "_version")

    def __init__(self, timeline: Timeline, kind: str, microbatch: int, version: int | None) -> None:
        self._timeline, self._kind, self._microbatch, self._version = timeline, kind, microbatch, version

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline._add(Span(self._kind, self._microbatch, self._start, time.monotonic(), self._version))


def from_simulation(simulation: Simulation, unit: float = 1e-3) -> list[list[Span]]:
    """A simulation's rows, as if they had been recorded; `unit` seconds for each unit of its time."""
    rows: list[list[Span]] = []
    for timed_row in simulation.rows:
        row: list[Span] = []
        free = 0.0
        for timed in timed_row:
            action = timed.action
            number = action.update if isinstance(action, Step) else action.microbatch
            if timed.start > free:
                row.append(Span("receive", number, free * unit, timed.start * unit))
            row.append(Span(type(action).__name__.lower(), number, timed.start * unit, timed.end * unit))
            free = timed.end
        rows.append(row)
    return rows


def _phases(rows: Sequence[Sequence[Span]]) -> Iterator[list[list[Span]]]:
    """The training between one evaluation, or omission, and the next: for each row its computing spans."""
    omitted = [span for row in rows for span in row if span.kind == "omitted"]
    # What only some rows still know is no ground to measure on: all rows drop the same time.
    begin = min((span.start for span in omitted), default=float("inf"))
    end = max((span.end for span in omitted), default=float("inf"))
    split = []
    for row in rows:
        known = [span for span in row if span.kind in COMPUTE | {"evaluate"} and not begin <= span.end <= end]
        runs = groupby(known, key=lambda span: (span.kind in COMPUTE, span.end > end))
        split.append([list(run) for (computes, _), run in runs if computes])
    for phase in zip_longest(*split, fillvalue=()):
        yield [list(run) for run in phase]


def _busy(row: Sequence[Span], begin: float, end: float) -> float:
    return sum(max(0.0, min(span.end, end) - max(span.start, begin)) for span in row)


def measured_bubble(rows: Sequence[Sequence[Span]]) -> float:
    """Fraction of the stages' time without forward, backward or step.

    Counted from the first forward to the last backward, without the evaluations in between.

    Raises:
        ValueError: no forward or backward was recorded.
    """
    busy = total = 0.0
    for phase in _phases(rows):
        passes = [span for row in phase for span in row if span.kind != "step"]
        if passes:
            begin, end = min(span.start for span in passes), max(span.end for span in passes)
            busy += sum(_busy(row, begin, end) for row in phase)
            total += len(rows) * (end - begin)
    if total == 0:
        raise ValueError("the timeline has no forward or backward: record at least one training step")
    return 1 - busy / total


def utilisation(rows: Sequence[Sequence[Span]], skip: int = 0) -> float | None:
    """Fraction of the stages' time in which they compute while the pipeline is full; None if it never is.

    It is full from when every stage has begun its backward number `skip` until the first stage ends its last
    forward but `skip`: the steady state of the asynchronous schedule, between fill and drain.
    """
    busy = total = 0.0
    for phase in _phases(rows):
        forwards = [[span.end for span in row if span.kind == "forward"] for row in phase]
        backwards = [[span.start for span in row if span.kind == "backward"] for row in phase]
        if any(len(column) <= skip for column in (*forwards, *backwards)):
            continue
        begin, end = max(column[skip] for column in backwards), min(column[-1 - skip] for column in forwards)
        if begin < end:
            busy += sum(_busy(row, begin, end) for row in phase)
            total += len(rows) * (end - begin)
    return busy / total if total else None


def report(rows: Sequence[Sequence[Span]], theory: float | None) -> str:
    """Measured bubble beside theory, in a line.

    A theory of 0 is that of a schedule that is never flushed, and speaks of its steady state.
    """
    whole = measured_bubble(rows)
    if theory is None:
        return f"bubble {whole:.1%} measured"
    full = utilisation(rows) if theory == 0 else None
    if full is None:
        return f"bubble {whole:.1%} measured, {theory:.1%} by theory"
    return f"steady-state bubble {1 - full:.1%} measured, 0% by theory ({whole:.1%} with fill and drain)"


def write_perfetto(rows: Sequence[Sequence[Span]], path: str | Path, *, labels: Sequence[str] | None = None) -> None:
    """Write the recording in Chrome's trace format, which https://ui.perfetto.dev opens: a thread a row."""
    begin = min((span.start for row in rows for span in row), default=0.0)
    events: list[dict[str, object]] = []
    for s, (row, label) in enumerate(zip(rows, _labels(rows, labels), strict=True)):
        thread = {"pid": 0, "tid": s}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": label}, **thread})
        events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": s}, **thread})
        for span in row:
            arguments = {"update" if span.kind == "step" else "microbatch": span.microbatch}
            if span.version is not None:
                arguments["version"] = span.version
            events.append(
                {
                    "ph": "X",
                    "name": span.kind if span.kind == "omitted" else f"{span.kind} {span.microbatch}",
                    "cat": span.kind,
                    "ts": (span.start - begin) * 1e6,  # microseconds
                    "dur": (span.end - span.start) * 1e6,
                    "args": arguments,
                    **thread,
                }
            )
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _labels(rows: Sequence[Sequence[Span]], labels: Sequence[str] | None) -> Sequence[str]:
    return labels if labels is not None else [f"stage {s}" for s in range(len(rows))]


# Okabe and Ito's palette, which readers of all kinds of colour vision tell apart.
_LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": "#0072B2", "edgecolor": "white", "linewidth": 0.4},
    "backward": {"facecolor": "#E69F00", "edgecolor": "white", "linewidth": 0.4},
    "step": {"facecolor": "#222222"},
    "evaluate": {"facecolor": "#56B4E9", "edgecolor": "white", "linewidth": 0.4},
    "send": {"facecolor": "#CC79A7"},
    "receive": {"facecolor": "#F7F7F7", "edgecolor": "#CCCCCC", "hatch": "/////", "linewidth": 0},
}
_TEXT_COLOURS = {"forward": "white", "backward": "black", "evaluate": "black"}
_WHOLE = 100  # forwards and backwards that a row can show legibly
_EACH_END = 32  # of a longer run: as many of its first and of its last


def write_png(
    rows: Sequence[Sequence[Span]],
    path: str | Path,
    *,
    title: str,
    theory: float | None,
    labels: Sequence[str] | None = None,
) -> None:
    """Draw the timeline: a row a stage, a box a span with the number of its microbatch where it fits.

    Of a long run the beginning and the end are drawn, side by side. Above: `title`, and `report` of the whole
    run. `labels` names the rows, "stage 0" and so on by default.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: no forward or backward was recorded.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RuntimeError("drawing a timeline needs matplotlib: pip install matplotlib") from error
    windows = _windows(rows)
    zero = windows[0][0]
    lengths = [end - begin for begin, end in windows]
    widths = [max(length, 0.4 * max(lengths)) for length in lengths]
    figure = Figure(figsize=(14, 1.5 + 0.45 * len(rows)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(windows), sharey=True, squeeze=False, width_ratios=widths)[0]
    for panel, (begin, end) in zip(panels, windows, strict=True):
        panel.set_xlim((begin - zero) * 1e3, (end - zero) * 1e3)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_xlabel("time (ms)")
    panels[0].set_yticks(range(len(rows)), _labels(rows, labels))
    panels[0].set_title(title, loc="left", fontweight="bold", pad=20)
    panels[0].annotate(
        report(rows, theory), (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points"
    )
    drawn = {span.kind for row in rows for span in row}
    legend = [
        Patch(label="waiting for a message" if kind == "receive" else kind, **look)
        for kind, look in _LOOKS.items()
        if kind in drawn
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.draw_without_rendering()  # lays out, so that a box's width is known
    for panel, (begin, end) in zip(panels, windows, strict=True):
        _draw(panel, rows, begin, end, zero)
    figure.savefig(path)


def _windows(rows: Sequence[Sequence[Span]]) -> list[tuple[float, float]]:
    """The times to draw: the whole run, or of a long one its beginning and its end, cut between updates."""
    passes = [[span for span in row if span.kind in ("forward", "backward")] for row in rows]
    if not any(passes):
        raise ValueError("the timeline has no forward or backward: record at least one training step")
    computed = [span for row in rows for span in row if span.kind in COMPUTE]
    begin, end = min(span.start for span in computed), max(span.end for span in computed)
    if max(map(len, passes)) <= _WHOLE:
        return [(begin, end)]
    first = max(row[:_EACH_END][-1].end for row in passes if row)
    last = min(row[-_EACH_END:][0].start for row in passes if row)
    steps = [[span.end for span in row if span.kind == "step"] for row in rows]
    from_first = [max(ends) for ends in zip(*steps, strict=False)]
    from_last = [max(ends) for ends in zip(*map(reversed, steps), strict=False)]
    return [
        (begin, max((time for time in from_first if time <= first), default=first)),
        (min((time for time in from_last if last <= time < end), default=last), end),
    ]


def _draw(panel: Axes, rows: Sequence[Sequence[Span]], begin: float, end: float, zero: float) -> None:
    """The boxes and numbers of one window, whose limits and layout are set."""
    points = panel.get_window_extent().width / panel.figure.dpi * 72 / (end - begin)  # for each second

    def fitting_size(span: Span) -> float:
        width = min(span.end, end) - max(span.start, begin)
        return (points * width - 2) / (0.64 * len(str(span.microbatch)))  # a digit is 0.64 em wide

    shown = [[span for span in row if span.end > begin and span.start < end] for row in rows]
    for kind, look in _LOOKS.items():
        sizes = sorted(fitting_size(span) for row in shown for span in row if span.kind == kind)
        # One size for all numbers of a kind, which most of them fit.
        size = min(9.0, sizes[len(sizes) // 10]) if sizes else 0.0
        for s, row in enumerate(shown):
            spans = [span for span in row if span.kind == kind]
            bars = [((span.start - zero) * 1e3, (span.end - span.start) * 1e3) for span in spans]
            panel.broken_barh(bars, (s - 0.4, 0.8), zorder=1 if kind == "receive" else 2, **look)
            for span in spans if kind in _TEXT_COLOURS and size >= 5 else ():
                if fitting_size(span) >= 0.9 * size:
                    middle = ((max(span.start, begin) + min(span.end, end)) / 2 - zero) * 1e3
                    style: dict[str, Any] = {"fontsize": size, "color": _TEXT_COLOURS[kind]}
                    panel.text(middle, s, str(span.microbatch), ha="center", va="center_baseline", **style)
