"""Simulated time of a training with one sort of stages: the schedule's, and what real pipelines lost on top.

The unit is what a stage computes for one batch, forward and backward, whatever the number of microbatches it comes in.
In theory, with p stages and m microbatches an update takes

    1F1B             (m + p - 1) / m      it flushes
    ZB-V             simulated            each stage goes on to the next batch by itself; two chunks a stage
    asynchronous     1                    and the fill once: (p - 1) / m
    the same in a V  simulated            the last stage waits for the next batch; the same fill

A microbatch of a smaller batch is taken to be as efficient as a large one, and validation to take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal, TypeAlias

from lightning_parallel.schedules.asynchronous_v import VShape
from lightning_parallel.schedules.named import Endless
from lightning_parallel.schedules.simulate import busy_across_batches
from lightning_parallel.schedules.steady import steady
from lightning_parallel.schedules.v_shaped import zbv

Synchronous: TypeAlias = Literal["1f1b", "zbv"]
Schedule: TypeAlias = Synchronous | VShape | Literal["async"]

NAMES: Mapping[Synchronous, str] = MappingProxyType({"1f1b": "1F1B", "zbv": "ZB-V"})

# The share of the time that stages computed, by p and m: measured with stages that sleep, inside Trainer.fit, all in
# one run, by `python -m tools.bench pipeline --only sleeping` (the table "Inside Trainer.fit").
MEASURED: Mapping[Schedule, Mapping[tuple[int, int], float]] = MappingProxyType(
    {
        "1f1b": {(4, 8): 0.671, (8, 16): 0.629},
        "zbv": {(4, 8): 0.855, (8, 16): 0.819},
        "async": {(4, 8): 0.911, (8, 16): 0.905},
        "vhalf": {(4, 8): 0.864, (8, 16): 0.814},
        "vmin": {(4, 8): 0.771, (8, 16): 0.686},
    }
)

Curve = Sequence[tuple[float, float]]  # updates, validation loss


@cache
def theory(schedule: Schedule, stages: int, microbatches: int) -> float:
    """The share of the time that stages compute, once the pipeline is full."""
    if schedule == "async":
        return 1.0
    if schedule == "vhalf" or schedule == "vmin":
        return steady(schedule, stages, microbatches).busy
    if schedule == "zbv":
        return busy_across_batches(zbv(stages, microbatches))
    return microbatches / (microbatches + stages - 1)


def busy(schedule: Schedule, stages: int, microbatches: int) -> float:
    """The share of the time that stages compute in a real pipeline. At sizes that weren't measured: theory's, times
    what a measured size kept of it, the most for a synchronous schedule and the least for an asynchronous one."""
    measured = MEASURED[schedule]
    if (stages, microbatches) in measured:
        return measured[stages, microbatches]
    kept = [share / theory(schedule, *sizes) for sizes, share in measured.items()]
    return theory(schedule, stages, microbatches) * (max(kept) if schedule in NAMES else min(kept))


def synchronous(schedule: Synchronous, stages: int, microbatches: int, updates: float) -> float:
    """Time of so many updates."""
    return updates / busy(schedule, stages, microbatches)


def of_arm(schedule: Endless) -> Schedule:
    """The name that an endless schedule has here."""
    return "async" if schedule == "1f1b" else schedule


def asynchronous(stages: int, microbatches: int, updates: float, schedule: Endless = "1f1b") -> float:
    """Time of so many updates, the fill included."""
    return (updates + (stages - 1) / microbatches) / busy(of_arm(schedule), stages, microbatches)


def reached(curve: Curve, loss: float) -> float | None:
    """Updates after which the loss is first as low, linear between validations; None: never."""
    before: tuple[float, float] | None = None
    for updates, value in curve:
        if value <= loss:
            if before is None:
                return updates
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (updates - before[0])
        before = (updates, value)
    return None
