"""What a picture shows of a run, and what Perfetto finds in its trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.schedules.generators import gpipe
from lightning_parallel.timeline import picture as drawing
from lightning_parallel.timeline.picture import draw, write_trace
from lightning_parallel.timeline.recording import Span, report
from tests.pipeline.recordings import joined, later, rows_of


def test_perfetto_trace_has_a_named_thread_a_stage_and_microseconds(tmp_path: Path) -> None:
    rows = later(rows_of(gpipe(2, 2), forward=20.0, backward=40.0, step=3.0), 100.0)
    write_trace(rows, tmp_path / "trace.json", labels=["stage 0 (rank 1)", "stage 1 (rank 0)"])
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "stage 0 (rank 1)", 1: "stage 1 (rank 0)"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(map(len, rows))
    first = spans[0]
    assert (first["name"], first["cat"], first["tid"]) == ("forward 0", "forward", 0)
    assert first["ts"] == pytest.approx(0)
    assert first["dur"] == pytest.approx(20_000, abs=1)
    step = next(e for e in spans if e["cat"] == "step" and e["tid"] == 1)
    assert (step["name"], step["args"]) == ("step 0", {"update": 0})
    assert step["ts"] == pytest.approx(20_000 * 3 + 40_000 * 2, abs=1)


def figure_of(rows: list[list[Span]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The figure that `draw` saves."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    draw(rows, "unused.png", **{"title": "title", "theory": None, **options})
    return saved[0]


def test_picture_has_a_box_a_span_and_says_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    loaded = "matplotlib.pyplot" in sys.modules
    rows = rows_of(gpipe(2, 3), forward=20.0, backward=40.0, step=5.0)
    figure = figure_of(rows, monkeypatch, theory=0.25, labels=["stage 0 (rank 1)", "stage 1 (rank 0)"])
    # pyplot would choose a window system, and keep every figure.
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["stage 0 (rank 1)", "stage 1 (rank 0)"]
    assert sum(len(bars.get_paths()) for bars in panel.collections) == sum(map(len, rows))
    numbers = sorted(text.get_text() for text in panel.texts if text.get_text().isdigit())
    assert numbers == sorted(["0", "1", "2"] * 4)
    assert panel.get_title(loc="left") == "title"
    assert report(rows, 0.25) in [text.get_text() for text in panel.texts]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "step", "waiting for a message"]
    assert panel.get_xlim() == pytest.approx((0, 245))  # ms: 4 forwards, 4 backwards, a step


def test_picture_of_a_long_run_shows_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    step = rows_of(gpipe(2, 7), forward=20.0, backward=40.0)
    length = 8 * 60  # ms
    figure = figure_of(joined(*(later(step, i * length * 1e-3) for i in range(100))), monkeypatch)
    (panel,) = figure.axes
    # As many whole steps, of 14 forwards and backwards a row, as there is room for.
    whole = drawing._LEGIBLE // 14
    assert panel.get_xlim() == pytest.approx((0, whole * length))
