"""Records on each rank what ran when, and measures it against theory. ``picture.py`` makes pictures of it.

A row is what one stage recorded, a list of `Span` in the order of time. Rows can be compared where the ranks share a
clock, as the processes of one machine share `time.monotonic`. A GPU runs what is launched later than the host launches
it: there the GPU notes the time, and the host reads it when the run is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

import torch

PASSES = frozenset({"forward", "backward", "backward input", "backward weight"})
COMPUTE = PASSES | {"step"}
_NOTHING = nullcontext()
_PER_BASE = 100  # marks in a GPU's queue


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did for one microbatch, or for one update.

    Computing spans of a row don't overlap.

    Attributes:
        kind: "forward", "backward", "backward input" and "backward weight" (its halves) or "step" (computing);
            "receive" (waiting for a message); "evaluate" (validation, test, prediction); or "omitted" (recording that
            was dropped).
        microbatch: its number; for a step, that of the update.
        version: for a forward of an asynchronous pipeline, the number of updates that made its weights.
        chunk: which of the stage's chunks, from 0.
    """

    kind: str
    microbatch: int
    start: float
    end: float
    version: int | None = None
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class _Base:
    """An event in a GPU's queue whose time by the host's clock is known, in seconds."""

    event: torch.cuda.Event
    time: float

    def time_of(self, later: torch.cuda.Event) -> float:
        return self.time + self.event.elapsed_time(later) / 1000


_Marked = tuple[str, int, Any, Any, int | None, int]  # a span, with marks for its times


class Timeline:
    """Recorder of one rank's spans.

    A long run keeps its first and its last spans; an "omitted" span stands for those between.

        timeline = Timeline(enabled=True)
        with timeline.span("forward", microbatch):
            ...

    Args:
        limit: the number of first, and of last, spans that are kept.
        device: on a GPU, times are those at which it comes to a place in its queue. The host waits for the GPU when
            this is set up, and when spans are read.
    """

    def __init__(self, enabled: bool, limit: int = 20_000, device: torch.device | None = None) -> None:
        self.enabled = enabled
        self._limit = limit
        self._first: list[_Marked] = []
        self._last: deque[_Marked] = deque(maxlen=limit)
        self._omitted_from: Any = None
        self.recorded = 0  # the number of spans so far, omitted ones too
        self._gpu = device if enabled and device is not None and device.type == "cuda" else None
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
            self._next = self._recorded_event()  # the next base, once the GPU has come to it
            self._base = _Base(self._next, time.monotonic())
            self._marks = 0

    def span(
        self, kind: str, microbatch: int, version: int | None = None, *, chunk: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs in the `with` block, also if it raises. It costs next to nothing when disabled."""
        return _Recording(self, kind, microbatch, version, chunk) if self.enabled else _NOTHING

    @property
    def spans(self) -> list[Span]:
        """The recorded spans, in the order in which they ended."""
        first, last = [self._read(marked) for marked in self._first], [self._read(marked) for marked in self._last]
        if self._omitted_from is None:
            return [*first, *last]
        return [*first, Span("omitted", -1, self._seconds(self._omitted_from), last[0].start), *last]

    def newest(self, count: int) -> list[Span]:
        """The last spans, as many of them as are kept."""
        kept = [*self._first, *self._last] if self._omitted_from is None else [*self._last]
        return [self._read(marked) for marked in kept[-count:]] if count else []

    def _now(self) -> Any:
        """A mark of this moment: by the host's clock, or in the GPU's queue.

        An event tells how long it came after another one, in milliseconds as a float32, which after an hour are exact
        to 0.25. So events are counted from a later base from time to time: from one that the GPU has come to by now.
        """
        if self._gpu is None:
            return time.monotonic()
        event = self._recorded_event()
        self._marks += 1
        if self._marks % _PER_BASE == 0 and self._next.query():
            self._base, self._next = _Base(self._next, self._base.time_of(self._next)), event
        return self._base, event

    def _recorded_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def _seconds(self, mark: Any) -> float:
        """A mark's time by the host's clock."""
        if self._gpu is None:
            return float(mark)
        base, event = mark
        event.synchronize()
        return float(base.time_of(event))

    def _read(self, marked: _Marked) -> Span:
        kind, microbatch, start, end, version, chunk = marked
        return Span(kind, microbatch, self._seconds(start), self._seconds(end), version, chunk)

    def _add(self, marked: _Marked) -> None:
        self.recorded += 1
        if len(self._first) < self._limit:
            self._first.append(marked)
            return
        if len(self._last) == self._limit and self._omitted_from is None:
            self._omitted_from = self._first[-1][3]  # its end
        self._last.append(marked)


class _Recording:
    """One `with timeline.span(...)`. It is a class, since `contextlib.contextmanager` costs several times more."""

    __slots__ = ("_chunk", "_kind", "_microbatch", "_start", "_timeline", "_version")

    def __init__(self, timeline: Timeline, kind: str, microbatch: int, version: int | None, chunk: int) -> None:
        self._timeline, self._kind, self._microbatch = timeline, kind, microbatch
        self._version, self._chunk = version, chunk

    def __enter__(self) -> None:
        self._start = self._timeline._now()

    def __exit__(self, *error: object) -> None:
        end = self._timeline._now()
        self._timeline._add((self._kind, self._microbatch, self._start, end, self._version, self._chunk))


# -- measuring ---------------------------------------------------------------------------------------------------


def _phases(rows: Sequence[Sequence[Span]]) -> Iterator[list[list[Span]]]:
    """The training between one evaluation, or omission, and the next: the computing spans of each row."""
    omitted = [span for row in rows for span in row if span.kind == "omitted"]
    # What only some rows still know can't be measured: all rows drop the same time.
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
    """The fraction of the stages' time without forward, backward or step.

    It is counted from the first forward to the last backward, without the evaluations in between.

    Raises:
        ValueError: no forward or backward was recorded.
    """
    busy = total = 0.0
    for phase in _phases(rows):
        passes = [span for row in phase for span in row if span.kind in PASSES]
        if passes:
            begin, end = min(span.start for span in passes), max(span.end for span in passes)
            busy += sum(_busy(row, begin, end) for row in phase)
            total += len(rows) * (end - begin)
    if total == 0:
        raise ValueError("The timeline has no forward or backward: record at least one training step.")
    return 1 - busy / total


def utilisation(rows: Sequence[Sequence[Span]]) -> float | None:
    """The fraction of the stages' time in which they compute while the pipeline is full; None if it never is.

    It is full from when every stage has begun a backward until the first stage ends its last forward: the steady state
    of the asynchronous schedule, between fill and drain.
    """
    busy = total = 0.0
    for phase in _phases(rows):
        forwards = [[span.end for span in row if span.kind == "forward"] for row in phase]
        backwards = [[span.start for span in row if span.kind in ("backward", "backward input")] for row in phase]
        if not all((*forwards, *backwards)):
            continue
        begin, end = max(column[0] for column in backwards), min(column[-1] for column in forwards)
        if begin < end:
            busy += sum(_busy(row, begin, end) for row in phase)
            total += len(rows) * (end - begin)
    return busy / total if total else None


def report(rows: Sequence[Sequence[Span]], theory: float | None) -> str:
    """The measured bubble beside ``theory``, in one line. A theory of 0 stands for a schedule that is never flushed, of
    which only the steady state counts; None for no theory."""
    whole = measured_bubble(rows)
    if theory is None:
        return f"bubble {whole:.1%} measured"
    full = utilisation(rows) if theory == 0 else None
    if full is None:
        return f"bubble {whole:.1%} measured, {theory:.1%} by theory"
    return f"steady-state bubble {1 - full:.1%} measured, 0% by theory ({whole:.1%} with fill and drain)"
