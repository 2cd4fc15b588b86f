"""Writes a recorded run as a trace file for Perfetto, https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.timeline.recording import Span


def write_trace(rows: Sequence[Sequence[Span]], path: str | Path, *, labels: Sequence[str] | None = None) -> None:
    """Write the recording in Chrome's trace format: a thread for each row. The rows' names are by default "stage 0" and
    so on."""
    begin = min((span.start for row in rows for span in row), default=0.0)
    events: list[dict[str, object]] = []
    for s, (row, label) in enumerate(zip(rows, row_labels(rows, labels), strict=True)):
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
                    "name": span.kind if span.kind == "omitted" else f"{span.kind} {span.microbatch}",
                    "cat": span.kind,
                    "ts": (span.start - begin) * 1e6,  # microseconds
                    "dur": (span.end - span.start) * 1e6,
                    "args": arguments,
                    **thread,
                }
            )
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def row_labels(rows: Sequence[Sequence[Span]], labels: Sequence[str] | None) -> Sequence[str]:
    """The given names of the rows, or "stage 0" and so on."""
    return labels if labels is not None else [f"stage {s}" for s in range(len(rows))]
