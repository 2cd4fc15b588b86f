"""A schedule as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
)
from lightning_parallel.schedules.simulate import Simulation, simulate


def clock_table(schedule: Schedule | Simulation, *, column: float | None = None, width: int | None = None) -> str:
    """Draw a schedule, or its simulation.

    `F2` starts the forward and `B2` the backward of microbatch 2, `=` continues it, `.` is waiting, and `|` ends a
    step. `I2` and `W2` are the halves of a backward. With several chunks a stage, `F2a` is that of its first chunk.

    Args:
        column: the time per column; by default the shortest forward or backward, so that each has a column.
        width: the most characters in a line. A longer table is cut, and ends with `...`.
    """
    simulation = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    computed = [t for row in simulation.rows for t in row if not isinstance(t.action, Step)]
    if column is None:
        column = min(t.end - t.start for t in computed)
    chunks = [sorted({t.action.chunk for t in row if not isinstance(t.action, Step)}) for row in simulation.rows]
    wide = max(len(_label(t.action, own)) for own, row in zip(chunks, simulation.rows, strict=True) for t in row)
    columns = max(1, math.ceil(simulation.makespan / column - 1e-6))
    lines = []
    for s, (own, row) in enumerate(zip(chunks, simulation.rows, strict=True)):
        cells, separators = ["."] * columns, [" "] * columns
        for t in row:
            # A column shows what runs at its middle: this action runs in the columns from first to beyond - 1.
            first, beyond = (max(0, math.ceil(time / column - 0.5 - 1e-6)) for time in (t.start, t.end))
            label = _label(t.action, own)
            if isinstance(t.action, Step):
                separators[max(0, beyond - 1)] = "|"
            cells[first:beyond] = ([label] + ["=" * len(label)] * columns)[: beyond - first]
        body = "".join(f"{cell:>{wide}}{end}" for cell, end in zip(cells, separators, strict=True))
        line = f"stage {s:<{len(str(len(simulation.rows) - 1))}} | {body}".rstrip()
        lines.append(line if width is None or len(line) <= width else line[: width - 4] + " ...")
    return "\n".join(lines)


def _label(action: Action, chunks: Sequence[int]) -> str:
    """An action of a stage with these chunks."""
    if isinstance(action, Step):
        return "S"
    letters = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
    chunk = "abcdefgh"[chunks.index(action.chunk) % 8] if len(chunks) > 1 else ""
    return f"{letters[type(action)]}{action.microbatch}{chunk}"
