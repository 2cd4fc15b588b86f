"""Simulated time of a training with one sort of stages: the schedule's, and what real pipelines lost on top.

The unit is what a stage computes for one batch, forward and backward, whatever the number of microbatches it comes in.
With p stages and m microbatches an update

    synchronous 1F1B    (m + p - 1) / m        each, for it flushes
    asynchronous        1                      each, and the fill once: (p - 1) / m

A microbatch of a smaller batch is taken to be as efficient as a large one, and validation to take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# Measured with stages that sleep, by `python -m recipes.bench pipeline` (the README's tables, 1F1B and "fewest
# microbatches in flight"). Synchronous: a step in units of the formula, by p and m. Asynchronous: share of the time
# that stages compute, by p.
SCHEDULES: Mapping[tuple[int, int], float] = MappingProxyType({(4, 8): 1.070, (8, 8): 1.074, (8, 16): 1.080})
SYNCHRONOUS_ELSE = 1.070  # the least of them
ASYNCHRONOUS: Mapping[int, float] = MappingProxyType({4: 0.908, 8: 0.911})
ASYNCHRONOUS_ELSE = 0.908  # the least of them

Curve = Sequence[tuple[float, float]]  # updates, validation loss


def busy(stages: int, microbatches: int, *, synchronous: bool) -> float:
    """Share of the time that stages compute, in theory, once the pipeline is full."""
    return microbatches / (microbatches + stages - 1) if synchronous else 1.0


def synchronous(stages: int, microbatches: int, updates: float) -> float:
    """Time of so many updates."""
    lost = SCHEDULES.get((stages, microbatches), SYNCHRONOUS_ELSE)
    return updates * lost / busy(stages, microbatches, synchronous=True)


def asynchronous(stages: int, microbatches: int, updates: float) -> float:
    """Time of so many updates, the fill included."""
    used = ASYNCHRONOUS.get(stages, ASYNCHRONOUS_ELSE)
    return (updates + (stages - 1) / microbatches) / used


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
