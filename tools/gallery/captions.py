"""What the pages say of a timeline, as conditions on what it shows.

A picture that a busy machine has drawn, or an older version of this package, isn't what its caption says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, median
from types import MappingProxyType

from lightning_parallel.timeline.recording import measured_bubble
from tools.gallery.pictures import BACKWARD, FORWARD, STAGES, TIMELINES, Rows, busy, length

_NEAR = 0.03  # of the bubble by theory
_BUSY = 0.95  # of the time is "nearly all", for the mean of the stages; and for one of them a little less
_AS_LONG = 0.2  # is the same duration
_PARTS = {"forward": FORWARD, "backward": BACKWARD, "backward input": BACKWARD / 2, "backward weight": BACKWARD / 2}


def unmet(name: str, rows: Rows) -> list[str]:
    """What a picture's caption says and the picture doesn't show.

    Args:
        name: of the picture.
        rows: what it shows, a row for each stage.
    """
    found = [*_passes(rows, TIMELINES[name].chunks)]
    return found or [*_bubble(rows, TIMELINES[name].theory), *_CLAIMS[name](rows)]


def _passes(rows: Rows, chunks: int) -> Iterator[str]:
    """Every stage has forwards and backwards, which take as long as the page says."""
    for stage, row in enumerate(rows):
        times = {kind: [span.end - span.start for span in row if span.kind == kind] for kind in _PARTS}
        if not times["forward"] or not (times["backward"] or times["backward input"]):
            yield f"stage {stage} has no forward or no backward"
        for kind, seconds in _PARTS.items():
            if times[kind] and abs(median(times[kind]) * chunks / seconds - 1) > _AS_LONG:
                yield f"stage {stage}: a {kind} takes {median(times[kind]):.3f} s, not {seconds / chunks:.3f} s"


def _bubble(rows: Rows, theory: float | None) -> Iterator[str]:
    if theory is not None and abs(measured_bubble(rows) - theory) > _NEAR:
        yield f"the bubble, {measured_bubble(rows):.1%}, is not near {theory:.1%}"


def _gpipe(rows: Rows) -> Iterator[str]:
    """All forwards, then all backwards, with idle triangles at both ends."""
    for stage, row in enumerate(rows):
        forwards = [span for span in row if span.kind == "forward"]
        backwards = [span for span in row if span.kind == "backward"]
        if forwards[-1].end > backwards[0].start:
            yield f"stage {stage} has a backward before a forward"
        if abs(forwards[0].start - stage * FORWARD) > FORWARD / 2:
            yield f"stage {stage} begins at {forwards[0].start:.3f} s"
        if abs(length(rows) - backwards[-1].end - stage * BACKWARD) > BACKWARD / 2:
            yield f"stage {stage} ends at {backwards[-1].end:.3f} s of {length(rows):.3f} s"


def _interleaved(rows: Rows) -> Iterator[str]:
    """The same with half of the idle time."""
    part = measured_bubble(rows) * length(rows) / ((STAGES - 1) * (FORWARD + BACKWARD))
    if abs(part - 0.5) > 0.15:
        yield f"stages wait {part:.0%} of the time that they wait in GPipe"


def _zbv(rows: Rows) -> Iterator[str]:
    """Each stage begins the second batch as soon as it is done with the first."""
    for stage, row in enumerate(rows):
        steps = [span for span in row if span.kind == "step"]
        update = min(steps, key=lambda span: abs(span.start - length(rows) / 2))
        begins = min(span.start for span in row if span.kind == "forward" and span.start >= update.end)
        if begins - update.start > FORWARD / 2:  # a forward of one chunk
            yield f"stage {stage} waits {begins - update.start:.3f} s between the batches"


def _vhalf(rows: Rows) -> Iterator[str]:
    """No stage holds the activations of more than three microbatches, of two chunks each."""
    for stage, row in enumerate(rows):
        held = most = 0
        for span in sorted(row, key=lambda span: span.start):
            held += (span.kind == "forward") - (span.kind in ("backward", "backward weight"))
            most = max(most, held)
        if most > 2 * (STAGES // 2 + 1):
            yield f"stage {stage} holds {most} chunks"


def _async(rows: Rows) -> Iterator[str]:
    """Every stage is busy nearly all of the time."""
    shares = [busy(row, length(rows)) for row in rows]
    if fmean(shares) < _BUSY or min(shares) < _BUSY - 0.02:
        yield "the stages are busy " + ", ".join(f"{share:.1%}" for share in shares)


def _async_vhalf(rows: Rows) -> Iterator[str]:
    """Stages are busy more than nine tenths of the time, with both of their chunks."""
    if (share := fmean(busy(row, length(rows)) for row in rows)) < 0.9:
        yield f"the stages are busy {share:.1%}"
    for stage, row in enumerate(rows):
        if {span.chunk for span in row if span.kind == "forward"} != {0, 1}:
            yield f"stage {stage} runs one chunk"


_CLAIMS: Mapping[str, Callable[[Rows], Iterator[str]]] = MappingProxyType(
    {
        "gpipe": _gpipe,
        "interleaved": _interleaved,
        "zbv": _zbv,
        "vhalf": _vhalf,
        "async": _async,
        "async_vhalf": _async_vhalf,
    }
)
