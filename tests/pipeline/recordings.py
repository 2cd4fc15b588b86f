"""Recordings as tests make them, without running anything."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.pipeline.actions import Schedule
from lightning_parallel.pipeline.simulate import simulate
from lightning_parallel.pipeline.timeline import Span, from_simulation


def rows_of(schedule: Schedule, **durations: float) -> list[list[Span]]:
    return from_simulation(simulate(schedule, **durations))


def later(rows: list[list[Span]], seconds: float) -> list[list[Span]]:
    return [[replace(x, start=x.start + seconds, end=x.end + seconds) for x in row] for row in rows]


def joined(*parts: list[list[Span]]) -> list[list[Span]]:
    """The same stages' rows one after the other."""
    return [[span for row in stage for span in row] for stage in zip(*parts, strict=True)]
