"""The study's tables."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from statistics import fmean

from recipes.tables import Cell, Table
from tools.study import clock
from tools.study.arms import Arm
from tools.study.clock import Synchronous
from tools.study.rows import Row

NAMES = {"adamw": "AdamW", "muon": "Muon", "nadamw": "NAdam", "soap": "SOAP"}
MARGIN = 0.005  # above the synchronous loss: the second target on the clock

READING = """\
Staleness and copies are the first layers': updates between a microbatch's forward and its backward, in the mean, and
copies of their weights beside the parameters, at most. Loss: of the parameters on the validation set after the last
update, in {unit}, with the standard deviation over the seeds. Gap: the distance to the synchronous arm's loss at
the same seed, the mean, and by seed. Busy: share of the time that stages compute, in theory. Speed-up: the synchronous
arm's time to its own final loss, by the mean curves and the simulated clock, divided by this arm's to the same loss;
above 1 this arm is there first. The synchronous arm has two microbatches a stage, and runs by 1F1B, or by the fastest
synchronous schedule, ZB-V across batches, which needs two chunks of layers a stage. *+0.5 %*: both to 0.5 % above that
loss."""


def of(found: Mapping[Arm, Row], optimizer: str, stages: int) -> dict[Arm, Row]:
    """The asynchronous arms of an optimizer and a number of stages."""
    return {arm: row for arm, row in found.items() if arm.optimizer == optimizer and arm.stages == stages}


def results(found: Mapping[Arm, Row], optimizer: str, stages: int) -> Table:
    columns = {"arm": "", "staleness": ".2f", "copies": "d", "rate": "g", "seeds": "d", "loss": "", "gap (%)": ""}
    columns |= {"by seed": "", "busy": "", "speed-up, 1F1B": "", "speed-up, ZB-V": "", "speed-up, ZB-V, +0.5 %": ""}
    synchronous = found[Arm(optimizer)]
    busy = [f"{clock.theory(schedule, stages, 2 * stages):.0%} ({name})" for schedule, name in clock.NAMES.items()]
    cells: list[list[Cell]] = [[*_common(synchronous), None, None, ", ".join(busy), None, None, None]]
    for arm, row in of(found, optimizer, stages).items():
        gaps = row.gaps(synchronous)
        cells.append(
            [
                *_common(row),
                signed(fmean(gaps.values())) if gaps else None,
                ", ".join(map(signed, gaps.values())),
                f"{clock.theory(clock.of_arm(arm.schedule), stages, arm.microbatches):.0%}",
                _speed_up(row, synchronous, "1f1b"),
                _speed_up(row, synchronous, "zbv"),
                _speed_up(row, synchronous, "zbv", MARGIN),
            ]
        )
    return Table(f"{NAMES[optimizer]}, {stages} stages", columns, cells)


def _common(row: Row) -> list[Cell]:
    """What every arm has, the synchronous one too."""
    if not isfinite(row.mean):
        loss = "diverged"
    else:
        loss = f"{row.mean:.4f}" + ("" if row.deviation is None else f" ± {row.deviation:.4f}")
    return [row.name, row.staleness, row.copies, row.rate, len(row.finals), loss]


def signed(gap: float) -> str:
    return f"{gap:+.2f}" if isfinite(gap) else "diverged"


def _speed_up(row: Row, synchronous: Row, schedule: Synchronous, margin: float = 0.0) -> str:
    if not isfinite(row.mean) or not isfinite(synchronous.mean):
        return "never"
    ratio = row.speed_up(synchronous, schedule, margin)
    if ratio is not None:
        return f"{ratio:.2f}"
    both = row.finals.keys() & synchronous.finals.keys()
    short = row.curve(both)[-1][1] / synchronous.curve(both)[-1][1] / (1 + margin) - 1
    return f"never ({short:.2%} short)"


def rates(found: Mapping[Arm, Row], optimizer: str) -> Table:
    """The losses on the first seed by which rates are chosen, the chosen rate's in bold."""
    mine = [row for arm, row in found.items() if arm.optimizer == optimizer]
    columns = sorted({rate for row in mine for rate in row.rates})
    cells: list[list[Cell]] = []
    for row in mine:
        line: list[Cell] = [None if row.arm.synchronous else row.arm.stages, row.name]
        for rate in columns:
            loss = row.rates.get(rate)
            text = None if loss is None else f"{loss:.4f}" if isfinite(loss) else "diverged"
            line.append(f"**{text}**" if rate == row.rate else text)
        cells.append(line)
    head = {"p": "d", "arm": ""} | {f"{rate:g}": "" for rate in columns}
    return Table(f"{NAMES[optimizer]}, first seed, by rate", head, cells)
