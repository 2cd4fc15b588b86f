"""Recordings, what is measured of them, what a picture shows of a run, and what Perfetto finds in its trace."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lightning_parallel.schedules.generators import gpipe
from lightning_parallel.schedules.named import SCHEDULES, asynchronous
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.timeline import picture as drawing
from lightning_parallel.timeline import recording
from lightning_parallel.timeline.picture import draw, write_trace
from lightning_parallel.timeline.recording import Span, Timeline, measured_bubble, report, utilisation
from tests.pipeline.recordings import joined, later, rows_of


class Event:
    """A GPU's: it comes some ms after the one that was recorded before it, whatever the host does meanwhile."""

    times: ClassVar[list[float]] = []  # of all that were recorded
    read: ClassVar[list[int]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.number = len(Event.times)
        Event.times.append(Event.times[-1] + 2.5 if Event.times else 0.0)

    def synchronize(self) -> None:
        Event.read.append(self.number)

    def elapsed_time(self, later: Event) -> float:
        return torch.tensor(Event.times[later.number] - Event.times[self.number], dtype=torch.float32).item()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "times", [])
    monkeypatch.setattr(Event, "read", [])
    return torch.device("cuda", 0)


def test_on_a_gpu_times_are_of_its_queue_and_read_at_the_end(gpu: torch.device) -> None:
    began = time.monotonic()
    timeline = Timeline(enabled=True, device=gpu)
    for k in range(2):
        with timeline.span("forward", k):
            time.sleep(0.01)  # the host's, while it launches
    assert not Event.read
    first, second = timeline.spans
    assert [first.end - first.start, second.start - first.end] == pytest.approx([0.0025, 0.0025])
    assert began <= first.start - 0.0025 <= time.monotonic() and Event.read


def test_a_long_run_keeps_its_first_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LIMIT", 10)
    timeline = Timeline(enabled=True)
    for k in range(20):
        with timeline.span("forward", k):
            pass
    assert [span.microbatch for span in timeline.spans] == list(range(10))
    disabled = Timeline(enabled=False)
    with disabled.span("forward", 0):
        pass
    assert disabled.spans == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_bubble_equals_theory_where_the_run_is_ideal(name: str) -> None:
    rows = rows_of(SCHEDULES[name](4, 8), forward=20.0, backward=40.0)
    # Idle time before and after belongs to no training step, and waiting counts whether it is recorded or not.
    silent = [[span for span in row if span.kind != "receive"] for row in later(rows, 17.0)]
    assert silent != later(rows, 17.0)
    for each in (rows, silent):
        assert measured_bubble(each) == pytest.approx(simulate(SCHEDULES[name](4, 8)).bubble)


def test_a_step_counts_as_busy_inside_and_evaluation_is_neither_waiting_nor_work() -> None:
    rows = [[Span("forward", 0, 0.0, 1.0), Span("step", 0, 1.0, 2.0), Span("backward", 0, 3.0, 4.0)]]
    assert measured_bubble(rows) == pytest.approx(1 / 4)
    rows[0].append(Span("step", 1, 4.0, 9.0))
    assert measured_bubble(rows) == pytest.approx(1 / 4)
    training = rows_of(gpipe(2, 3))
    evaluating = [[Span("evaluate", 0, 1.0, 3.0)], [Span("evaluate", 0, 2.0, 5.0)]]
    rows = joined(evaluating, later(training, 10.0), later(evaluating, 20.0), later(training, 30.0))
    assert measured_bubble(rows) == pytest.approx(simulate(gpipe(2, 3)).bubble)
    part = rows_of(asynchronous(4, 1, 20))  # every fill and drain is left out
    assert utilisation(joined(part, [evaluating[0]] * 4, later(part, 4.0))) == pytest.approx(1.0)


def test_only_what_all_rows_have_recorded_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LIMIT", 300)
    rows = rows_of(asynchronous(3, 1, 400))
    rows[0] = [span for span in rows[0] if span.kind != "receive"]  # it records for a longer time
    cut = [row[:300] for row in rows]
    assert measured_bubble(cut) < 0.1
    assert utilisation(cut) == pytest.approx(1.0)


def test_report_puts_the_measured_bubble_beside_theory() -> None:
    rows = rows_of(gpipe(4, 8))
    assert report(rows, simulate(gpipe(4, 8)).bubble) == "bubble 27.3% measured, 27.3% by theory"
    assert report(rows, None) == "bubble 27.3% measured"
    endless = rows_of(asynchronous(4, 1, 24))
    whole = f"({measured_bubble(endless):.1%} with fill and drain)"
    assert report(endless, 0.0) == f"steady-state bubble 0.0% measured, 0% by theory {whole}"
    with pytest.raises(ValueError, match="no forward or backward"):
        measured_bubble([[], []])


# -- pictures ----------------------------------------------------------------------------------------------------------


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
