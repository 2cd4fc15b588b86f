"""Records on each rank what ran when, and measures it against theory. ``picture.py`` makes pictures of it.

A row is what one stage recorded, a list of `Span` in the order of time. Rows can be compared where the ranks share a
clock, as the processes of one machine share `time.monotonic`. A GPU runs what is launched later than the host launches
it: there the GPU notes the time, and the host reads it when the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, zip_longest
from types import MappingProxyType
from typing import Any

import torch

from lightning_parallel.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Step

SPAN_NAMES: Mapping[type[Action], str] = MappingProxyType(  # names of the spans in which something is computed
    {
        Forward: "forward",
        Backward: "backward",
        BackwardInput: "backward input",
        BackwardWeight: "backward weight",
        Step: "step",
    }
)
COMPUTE = frozenset(SPAN_NAMES.values())
PASSES = COMPUTE - {"step"}
_NOTHING = nullcontext()
LIMIT = 40_000  # spans


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage did for one microbatch, or for one update.

    Computing spans of a row don't overlap.

    Attributes:
        kind: "forward", "backward", "backward input" and "backward weight" (its halves) or "step" (computing);
            "receive" (waiting for a message); or "evaluate" (validation, test, prediction).
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


_Marked = tuple[str, int, Any, Any, int | None, int]  # a span, with marks for its times


class Timeline:
    """Recorder of one rank's spans. Of a long run it keeps the first :data:`LIMIT`.

        timeline = Timeline(enabled=True)
        with timeline.span("forward", microbatch):
            ...

    Args:
        device: on a GPU, times are those at which it comes to a place in its queue. The host waits for the GPU when
            this is set up, and when spans are read.
    """

    def __init__(self, enabled: bool, device: torch.device | None = None) -> None:
        self.enabled = enabled
        self._marked: list[_Marked] = []
        self._gpu = device if enabled and device is not None and device.type == "cuda" else None
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
            self._base, self._begun = self._now(), time.monotonic()

    def span(
        self, kind: str, microbatch: int, version: int | None = None, *, chunk: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs in the `with` block, also if it raises. It costs next to nothing when disabled."""
        if not self.enabled or len(self._marked) >= LIMIT:
            return _NOTHING
        return _Recording(self, kind, microbatch, version, chunk)

    @property
    def spans(self) -> list[Span]:
        """The recorded spans, in the order in which they ended."""
        return [
            Span(kind, microbatch, self._seconds(start), self._seconds(end), version, chunk)
            for kind, microbatch, start, end, version, chunk in self._marked
        ]

    def _now(self) -> Any:
        """A mark of this moment: by the host's clock, or in the GPU's queue."""
        if self._gpu is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def _seconds(self, mark: Any) -> float:
        """A mark's time by the host's clock. A GPU's is exact to a float32 of the time since the beginning."""
        if self._gpu is None:
            return float(mark)
        mark.synchronize()
        return float(self._begun + self._base.elapsed_time(mark) / 1000)


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
        self._timeline._marked.append((self._kind, self._microbatch, self._start, end, self._version, self._chunk))


# -- measuring ---------------------------------------------------------------------------------------------------


def _phases(rows: Sequence[Sequence[Span]]) -> Iterator[list[list[Span]]]:
    """The training between one evaluation and the next: the computing spans of each row."""
    # What only some rows have recorded can't be measured.
    end = min((row[-1].end for row in rows if len(row) >= LIMIT), default=float("inf"))
    split = []
    for row in rows:
        known = [span for span in row if span.kind in COMPUTE | {"evaluate"} and span.end <= end]
        runs = groupby(known, key=lambda span: span.kind in COMPUTE)
        split.append([list(run) for computes, run in runs if computes])
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
