"""The timeline of a run: gathered at its end, compared with theory, and written as a picture and a trace."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_parallel.ranks.collectives import gather_objects_on_first
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.timeline.picture import draw, write_trace
from lightning_parallel.timeline.recording import Span, Timeline, report


def warn_without_pictures() -> None:
    """Warn at the start of a run that no picture will be written at its end."""
    if find_spec("matplotlib") is None:
        rank_zero_warn(
            "timeline=True, but matplotlib is not installed: only the trace and the measured bubble will be written. "
            "For the picture: pip install 'lightning-parallel[pictures]'."
        )


def write_timeline(
    timeline: Timeline,
    layout: Layout,
    host_group: dist.ProcessGroup,
    directory: Path,
    *,
    title: str,
    theory: float,
    staleness: Mapping[int, int] | None = None,
) -> None:
    """Gather on rank 0 what the ranks of its pipeline recorded, and write it there. All ranks of all pipelines call it.

    Args:
        host_group: the ranks of this rank's pipeline, for objects.
        theory: the theoretical bubble, a fraction.
        staleness: in an asynchronous pipeline, for each number of updates that gradients were late, how many gradients
            were.
    """
    ranks = layout.peers("pipeline")  # by stage
    if 0 not in ranks:  # a pipeline of another replica or tensor shard: none of its ranks writes anything
        return
    own: tuple[list[Span], dict[int, int] | None] = (timeline.spans, None if staleness is None else dict(staleness))
    everyones = gather_objects_on_first(own, host_group)
    if everyones is None:
        return
    recorded = dict(zip(sorted(ranks), everyones, strict=True))  # a group has its ranks in ascending order
    stages = [recorded[rank] for rank in ranks]
    rows = [spans for spans, _ in stages]
    labels = [f"stage {stage} (rank {layout.rank_at(pipeline=stage)})" for stage in range(layout.stages)]
    directory.mkdir(parents=True, exist_ok=True)
    write_trace(rows, directory / "timeline.json", labels=labels)
    written = "timeline.json"
    if find_spec("matplotlib") is not None:
        draw(rows, directory / "timeline.png", title=title, theory=theory, labels=labels)
        written = "timeline.png and timeline.json"
    rank_zero_info(f"{report(rows, theory)}\nWritten: {directory}/{written}")
    for stage, (_, late) in enumerate(stages):
        if late is not None:
            rank_zero_info(_lateness(stage, late))


def _lateness(stage: int, counts: Mapping[int, int]) -> str:
    total = max(1, sum(counts.values()))
    shares = ", ".join(f"{late}: {100 * count / total:.0f} %" for late, count in sorted(counts.items()))
    mean = sum(late * count for late, count in counts.items()) / total
    return f"stage {stage}: gradients {mean:.2f} updates late in the mean ({shares})"
