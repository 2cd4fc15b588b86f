"""Recordings as tests make them, without running anything."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.schedules.actions import Schedule, Step
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.timeline.recording import SPAN_NAMES, Span

UNIT = 1e-3  # seconds for each unit of a simulation's time


def rows_of(schedule: Schedule, **durations: float) -> list[list[Span]]:
    """A simulation's rows, as if they had been recorded."""
    rows: list[list[Span]] = []
    for timed_row in simulate(schedule, **durations).rows:
        row: list[Span] = []
        chunks = sorted({timed.action.chunk for timed in timed_row if not isinstance(timed.action, Step)})
        free = 0.0
        for timed in timed_row:
            action = timed.action
            number = action.update if isinstance(action, Step) else action.microbatch
            if timed.start > free:
                row.append(Span("receive", number, free * UNIT, timed.start * UNIT))
            chunk = 0 if isinstance(action, Step) else chunks.index(action.chunk)
            row.append(Span(SPAN_NAMES[type(action)], number, timed.start * UNIT, timed.end * UNIT, chunk=chunk))
            free = timed.end
        rows.append(row)
    return rows


def later(rows: list[list[Span]], seconds: float) -> list[list[Span]]:
    return [[replace(x, start=x.start + seconds, end=x.end + seconds) for x in row] for row in rows]


def joined(*parts: list[list[Span]]) -> list[list[Span]]:
    """The same stages' rows one after the other."""
    return [[span for row in stage for span in row] for stage in zip(*parts, strict=True)]
