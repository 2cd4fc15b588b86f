"""What the runs show, in sentences that they decide: whatever a figure says is written, not what was expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import isfinite
from statistics import fmean

from lightning_parallel.pipeline.staleness import Correction
from lightning_parallel.schedules.named import TITLES
from tools.study.arms import Arm
from tools.study.rows import Row
from tools.study.tables import MARGIN, NAMES, of, signed


def findings(found: Mapping[Arm, Row], optimizers: Sequence[str], stages: Sequence[int]) -> list[str]:
    lines = [line for p in stages for name in optimizers for line in _gaps(found, name, p)]
    return [*lines, *_uncorrected_or_read(found)]


def _gaps(found: Mapping[Arm, Row], name: str, p: int) -> Iterator[str]:
    """How far from the synchronous loss the arms end, and when those that were corrected get there."""
    synchronous, mine = found[Arm(name)], of(found, name, p)
    begin = f"{NAMES[name]}, {p} stages"
    for m, schedule in product((4 * p, 2 * p, p), TITLES):
        corrections: tuple[Correction, ...] = ("second_order", "error_feedback", None)
        second, first, none = (mine.get(Arm(name, p, m, "stash", c, schedule)) for c in corrections)
        if second is None:
            continue
        gaps = second.gaps(synchronous)
        others = [f"{_gap(row, synchronous)} with error feedback" for row in [first] if row]
        others += [f"{_gap(row, synchronous)} without a correction" for row in [none] if row]
        seeds = f"by seed {', '.join(map(signed, gaps.values()))}"
        beside = f"; {' and '.join(others)}" if others else ""
        when = f" On the simulated clock it {_clock(second, synchronous)}" if isfinite(second.mean) else ""
        shape = "" if schedule == "1f1b" else f", {TITLES[schedule]}"
        yield f"{begin}{shape}, m={m}: {_gap(second, synchronous)} with second order ({seeds}){beside}.{when}"
    rest = [row for arm, row in mine.items() if arm.weights != "stash" or arm.microbatches == 1]
    if rest:
        yield f"{begin}: " + "; ".join(f"{row.name} {_gap(row, synchronous)}" for row in rest) + "."


def _gap(row: Row, synchronous: Row) -> str:
    return f"{signed(fmean(row.gaps(synchronous).values()))} %"


def _clock(row: Row, synchronous: Row) -> str:
    if row.speed_up(synchronous, "1f1b") is not None:
        return f"reaches the synchronous arm's final loss {_times_as_fast(row, synchronous)}"
    if row.speed_up(synchronous, "1f1b", MARGIN) is not None:
        return (
            f"does not reach the synchronous arm's final loss; it comes within {100 * MARGIN:g} % of it "
            f"{_times_as_fast(row, synchronous, MARGIN)}"
        )
    return f"does not come within {100 * MARGIN:g} % of the synchronous arm's final loss."


def _times_as_fast(row: Row, synchronous: Row, margin: float = 0.0) -> str:
    plain, best = (row.speed_up(synchronous, schedule, margin) for schedule in ("1f1b", "zbv"))
    return f"{plain:.2f} times as fast as that arm by 1F1B, {best:.2f} times as fast as by ZB-V."


def _uncorrected_or_read(found: Mapping[Arm, Row]) -> Iterator[str]:
    """Which weights a validation should see."""
    pairs = [
        (final, row.read[seed])
        for arm, row in found.items()
        if arm.correction is not None
        for seed, final in row.finals.items()
        if isfinite(final + row.read[seed])
    ]
    if pairs:
        higher = [100 * (read / final - 1) for final, read in pairs]
        better = sum(final < read for final, read in pairs)
        yield (
            f"At the end of corrected runs, the parameters had a lower loss than what the next microbatch's forward "
            f"would read in {better} of {len(pairs)} runs; the latter's is {signed(fmean(higher))} % off in the mean."
        )
