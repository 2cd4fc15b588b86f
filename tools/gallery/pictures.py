"""The timelines on the pages, from real runs of stages that sleep.

A picture shows a part of its run: whole batches, or so many microbatches of the asynchronous pipeline, in mid-run. What
it shows is kept in its file, so that a test can compare it with what the pages say of it (``captions.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from xml.etree import ElementTree

import matplotlib as mpl
import torch
import torch.distributed as dist

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.schedules.v_shaped import vhalf
from lightning_parallel.strategies.staged import StagedStrategy
from lightning_parallel.timeline.picture import draw
from lightning_parallel.timeline.recording import COMPUTE, Span
from recipes import ROOT
from tools.bench import processes
from tools.bench.layers import fit, sleeping

PICTURES = ROOT / "docs" / "pictures"
STAGES = 4
FORWARD, BACKWARD = 0.100, 0.200  # seconds of a stage for a microbatch: long beside what else a step takes
SIZE = 512  # a microbatch is a float32 matrix of 1 MiB
_SPANS = "{http://www.w3.org/2000/svg}metadata"  # the element of a picture's file that has what it shows

Rows = Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Picture:
    """One of the timelines.

    Attributes:
        title: above it.
        strategy: makes that of its run.
        window: of its run, what it shows: the seconds at which it begins and ends.
        batches: of its run.
        chunks: of a stage.
        theory: the bubble by theory, where it shows a whole one.
        inches: its width.
    """

    title: str
    strategy: Callable[[], StagedStrategy]
    window: Callable[[Rows], tuple[float, float]]
    batches: int = 3
    chunks: int = 1
    theory: float | None = None
    inches: float = 9


def _batches_of(row: Sequence[Span]) -> list[list[Span]]:
    """What a stage computed for each batch of a synchronous pipeline, without the update that ends it."""
    batches: list[list[Span]] = [[]]
    for span in row:
        if span.kind == "step":
            batches.append([])
        elif span.kind in COMPUTE:
            batches[-1].append(span)
    return [batch for batch in batches if batch]


def _batches(first: int, last: int) -> Callable[[Rows], tuple[float, float]]:
    """From the moment at which a stage begins the one batch until all stages are done with the other."""

    def window(rows: Rows) -> tuple[float, float]:
        batches = [_batches_of(row) for row in rows]
        return min(each[first][0].start for each in batches), max(each[last][-1].end for each in batches)

    return window


def _microbatches(first: int, count: int) -> Callable[[Rows], tuple[float, float]]:
    """So many, at the pace of the last stage, which begins with the first of them."""

    def window(rows: Rows) -> tuple[float, float]:
        starts = {span.microbatch: span.start for span in rows[-1] if span.kind == "forward"}
        return starts[first], starts[first + count]

    return window


TIMELINES: Mapping[str, Picture] = MappingProxyType(
    {
        "gpipe": Picture(
            "GPipe, 4 stages, 8 microbatches",
            lambda: PipelineStrategy(schedule="gpipe", microbatches=8, balance="layers", timeline=True),
            _batches(1, 1),
            theory=3 / 11,
        ),
        "interleaved": Picture(
            "interleaved 1F1B, 4 stages of 2 chunks, 8 microbatches",
            lambda: PipelineStrategy(schedule="interleaved", microbatches=8, balance="layers", timeline=True),
            _batches(1, 1),
            chunks=2,
            theory=3 / 19,
        ),
        "zbv": Picture(
            "ZB-V, 4 stages, two batches of 8 microbatches, in mid-run",
            lambda: PipelineStrategy(schedule="zbv", microbatches=8, balance="layers", timeline=True),
            _batches(1, 2),
            batches=4,
            chunks=2,
            inches=14,
        ),
        "vhalf": Picture(
            "V-Half, 4 stages, 8 microbatches",
            lambda: PipelineStrategy(schedule="vhalf", microbatches=8, balance="layers", timeline=True),
            _batches(2, 2),
            batches=4,
            chunks=2,
            theory=simulate(vhalf(STAGES, 8)).bubble,
            inches=14,
        ),
        "async": Picture(
            "asynchronous 1F1B, 4 stages, an update every 8 microbatches, in mid-run",
            lambda: AsyncPipelineStrategy(microbatches=8, balance="layers", timeline=True),
            _microbatches(12, 8),
            batches=4,
        ),
        "async_vhalf": Picture(
            "asynchronous V-Half, 4 stages, an update of each chunk every 8 microbatches, in mid-run",
            lambda: AsyncPipelineStrategy(schedule="vhalf", microbatches=8, balance="layers", timeline=True),
            _microbatches(44, 8),  # losses are tried in the batches 0, 1, 2, 4 and 8
            batches=7,
            chunks=2,
            inches=14,
        ),
    }
)


def record(name: str, stages: int = STAGES) -> Rows:
    """Run a picture's training: what it is to show, a row for each stage, from 0 s."""
    with TemporaryDirectory() as folder:
        processes.run(_train, stages, name, folder)
        rows = _read_trace(Path(folder) / "timeline.json")
    begin, end = TIMELINES[name].window(rows)
    return [
        [
            replace(span, start=round(max(span.start, begin) - begin, 6), end=round(min(span.end, end) - begin, 6))
            for span in row
            if span.end > begin and span.start < end
        ]
        for row in rows
    ]


def _train(name: str, folder: str) -> None:
    picture = TIMELINES[name]
    layers = sleeping(picture.chunks * dist.get_world_size(), FORWARD / picture.chunks, BACKWARD / picture.chunks)
    fit(layers, picture.strategy(), torch.randn(8, SIZE, SIZE), picture.batches, directory=folder)


def _read_trace(path: Path) -> Rows:
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    rows: list[list[Span]] = [[] for _ in range(1 + max(event["tid"] for event in events))]
    for event in events:
        args, start = event["args"], event["ts"] / 1e6
        number = args["update" if event["cat"] == "step" else "microbatch"]
        span = Span(event["cat"], number, start, start + event["dur"] / 1e6, args.get("version"), args.get("chunk", 0))
        rows[event["tid"]].append(span)
    return rows


def busy(row: Sequence[Span], end: float) -> float:
    """The share of the time from 0 to ``end`` in which a stage computes."""
    return sum(span.end - span.start for span in row if span.kind in COMPUTE) / end


def length(rows: Rows) -> float:
    """The seconds that a picture shows."""
    return max(span.end for row in rows for span in row)


def write(name: str, rows: Rows, path: Path) -> None:
    """Draw what was recorded. The file has the drawn spans, too, for :func:`read`."""
    picture = TIMELINES[name]
    with mpl.rc_context({"svg.hashsalt": name}):  # the same picture is the same file
        draw(rows, path, title=picture.title, theory=picture.theory, width=picture.inches)
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    drawing = ElementTree.parse(path)
    kept = drawing.getroot().find(_SPANS)
    assert kept is not None, "matplotlib writes the date and its version there"
    kept.clear()
    kept.text = json.dumps([[list(asdict(span).values()) for span in row] for row in rows])
    drawing.write(path)


def read(path: Path) -> Rows:
    """What a picture shows."""
    kept = ElementTree.parse(path).getroot().findtext(_SPANS)
    assert kept is not None, f"{path} was drawn by something else"
    return [[Span(*span) for span in row] for row in json.loads(kept)]
