from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.pipeline import timeline as module
from lightning_parallel.pipeline.schedule import SYNCHRONOUS, Schedule, asynchronous, gpipe
from lightning_parallel.pipeline.simulate import bubble, simulate
from lightning_parallel.pipeline.timeline import (
    Span,
    Timeline,
    from_simulation,
    measured_bubble,
    report,
    utilisation,
    write_perfetto,
    write_png,
)


def rows_of(schedule: Schedule, **durations: float) -> list[list[Span]]:
    return from_simulation(simulate(schedule, **durations))


def later(rows: list[list[Span]], seconds: float) -> list[list[Span]]:
    return [[replace(x, start=x.start + seconds, end=x.end + seconds) for x in row] for row in rows]


def joined(*parts: list[list[Span]]) -> list[list[Span]]:
    """The same stages' rows one after the other."""
    return [[span for row in stage for span in row] for stage in zip(*parts, strict=True)]


def test_spans_are_recorded_in_seconds_of_the_monotonic_clock() -> None:
    timeline = Timeline(enabled=True)
    before = time.monotonic()
    with timeline.span("forward", 3):
        time.sleep(0.01)
    with pytest.raises(KeyError), timeline.span("backward", 3):
        raise KeyError
    after = time.monotonic()
    forward, backward = timeline.spans
    assert (forward.kind, forward.microbatch, backward.kind) == ("forward", 3, "backward")
    assert before <= forward.start <= forward.end - 0.01
    assert forward.end <= backward.start <= backward.end <= after


def test_disabled_recorder_keeps_nothing() -> None:
    timeline = Timeline(enabled=False)
    with timeline.span("forward", 0):
        pass
    assert timeline.spans == []


def test_long_run_keeps_its_first_and_last_spans() -> None:
    timeline = Timeline(enabled=True, limit=10)
    for k in range(20):
        with timeline.span("forward", k):
            pass
    assert [span.microbatch for span in timeline.spans] == list(range(20))
    for k in range(20, 500):
        with timeline.span("forward", k):
            pass
    first, omitted, last = timeline.spans[:10], timeline.spans[10], timeline.spans[11:]
    assert [span.microbatch for span in first] == list(range(10))
    assert [span.microbatch for span in last] == list(range(490, 500))
    assert omitted == Span("omitted", -1, first[-1].end, last[0].start)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 8)])
def test_measured_bubble_equals_theory_where_the_run_is_ideal(name: str, stages: int, microbatches: int) -> None:
    rows = rows_of(SYNCHRONOUS[name](stages, microbatches), forward=20.0, backward=40.0)
    assert measured_bubble(rows) == pytest.approx(bubble(name, stages, microbatches))
    # Idle time before and after belongs to no training step.
    assert measured_bubble(later(rows, 17.0)) == pytest.approx(bubble(name, stages, microbatches))


def test_step_counts_as_busy_between_first_forward_and_last_backward() -> None:
    rows = [[Span("forward", 0, 0.0, 1.0), Span("step", 0, 1.0, 2.0), Span("backward", 0, 3.0, 4.0)]]
    assert measured_bubble(rows) == pytest.approx(1 / 4)
    rows[0].append(Span("step", 1, 4.0, 9.0))
    assert measured_bubble(rows) == pytest.approx(1 / 4)


def test_waiting_counts_whether_recorded_or_not() -> None:
    rows = rows_of(gpipe(3, 4))
    silent = [[span for span in row if span.kind != "receive"] for row in rows]
    assert silent != rows
    assert measured_bubble(silent) == measured_bubble(rows)


def test_evaluation_is_neither_waiting_nor_work() -> None:
    training = rows_of(gpipe(2, 3))
    evaluating = [[Span("evaluate", 0, 1.0, 3.0)], [Span("evaluate", 0, 2.0, 5.0)]]
    rows = joined(evaluating, later(training, 10.0), later(evaluating, 20.0), later(training, 30.0))
    assert measured_bubble(rows) == pytest.approx(bubble("gpipe", 2, 3))


def test_omitted_time_is_neither_waiting_nor_work() -> None:
    whole = rows_of(asynchronous(3, 1, 400))
    cut = []
    for keep, row in zip((300, 200, 100), whole, strict=True):  # rows forget at different times
        hole = Span("omitted", -1, row[keep - 1].end, row[-keep].start)
        cut.append([*row[:keep], hole, *row[-keep:]])
    assert measured_bubble(cut) < 0.1
    assert utilisation(cut) == pytest.approx(1.0)


def test_utilisation_is_one_in_the_asynchronous_steady_state() -> None:
    rows = rows_of(asynchronous(4, 1, 20), step=0.5)
    assert measured_bubble(rows) > 0.1
    assert utilisation(rows) == pytest.approx(1.0)
    assert utilisation(rows, skip=3) == pytest.approx(1.0)


def test_utilisation_after_drains_leaves_out_every_fill_and_drain() -> None:
    part = rows_of(asynchronous(4, 1, 20))
    evaluating = [[Span("evaluate", 0, 1.0, 3.0)]] * 4
    assert utilisation(joined(part, evaluating, later(part, 4.0))) == pytest.approx(1.0)


@pytest.mark.parametrize("slow", [1, 9])
def test_utilisation_skips_slow_first_and_last_microbatches(slow: int) -> None:
    (row,) = rows_of(asynchronous(1, 1, 10))  # three spans an update
    rows = [row[: 3 * slow] + later([row[3 * slow :]], 5.0)[0]]  # 5 s pass before the forward `slow`
    busy = utilisation(rows)
    assert busy is not None
    assert busy < 0.1
    assert utilisation(rows, skip=1) == pytest.approx(1.0)


def test_utilisation_is_none_where_the_pipeline_never_is_full() -> None:
    assert utilisation(rows_of(gpipe(4, 8))) is None
    assert utilisation(rows_of(asynchronous(4, 1, 20)), skip=100) is None


def test_report_puts_the_measured_bubble_beside_theory() -> None:
    rows = rows_of(gpipe(4, 8))
    assert report(rows, bubble("gpipe", 4, 8)) == "bubble 27.3% measured, 27.3% by theory"
    assert report(rows, None) == "bubble 27.3% measured"
    endless = rows_of(asynchronous(4, 1, 24))
    whole = f"({measured_bubble(endless):.1%} with fill and drain)"
    assert report(endless, 0.0) == f"steady-state bubble 0.0% measured, 0% by theory {whole}"


def test_nothing_recorded_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="no forward or backward"):
        measured_bubble([[], []])
    with pytest.raises(ValueError, match="no forward or backward"):
        write_png([[Span("evaluate", 0, 0.0, 1.0)]], "unused.png", title="", theory=None)


def test_perfetto_trace_has_a_named_thread_a_stage_and_microseconds(tmp_path: Path) -> None:
    rows = later(rows_of(gpipe(2, 2), forward=20.0, backward=40.0, step=3.0), 100.0)
    write_perfetto(rows, tmp_path / "trace.json", labels=["stage 0 (rank 1)", "stage 1 (rank 0)"])
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
    """The figure that `write_png` saves."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    write_png(rows, "unused.png", **{"title": "title", "theory": None, **options})
    return saved[0]


def test_picture_is_a_png_without_touching_pyplot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    loaded = "matplotlib.pyplot" in sys.modules
    path = tmp_path / "timeline.png"
    write_png(rows_of(gpipe(4, 8)), path, title="GPipe", theory=0.27)
    assert path.read_bytes().startswith(b"\x89PNG")
    # pyplot would choose a window system, and keep every figure.
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_picture_has_a_box_a_span_and_says_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of(gpipe(2, 3), forward=20.0, backward=40.0, step=5.0)
    figure = figure_of(rows, monkeypatch, theory=0.25, labels=["stage 0 (rank 1)", "stage 1 (rank 0)"])
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


def test_picture_of_a_long_run_shows_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    step = rows_of(gpipe(2, 5), forward=20.0, backward=40.0)
    length = 6 * 60  # ms
    figure = figure_of(joined(*(later(step, i * length * 1e-3) for i in range(100))), monkeypatch)
    first, last = figure.axes
    # As many whole steps, of 10 forwards and backwards a row, as there is room for.
    whole = module._EACH_END // 10
    assert first.get_xlim() == pytest.approx((0, whole * length))
    assert last.get_xlim() == pytest.approx(((100 - whole) * length, 100 * length))
    numbers = [text.get_text() for text in last.texts if text.get_text().isdigit()]
    assert sorted(numbers) == sorted(list("01234") * 2 * 2 * whole)


def test_missing_matplotlib_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        write_png(rows_of(gpipe(2, 2)), "unused.png", title="", theory=None)
