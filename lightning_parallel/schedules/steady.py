"""What endless lists cost once the pipeline is full: how late gradients are, and how much stages compute."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from lightning_parallel.schedules.actions import Forward, StepOfChunk
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.asynchronous_v import VShape
from lightning_parallel.schedules.blocks import PERIOD
from lightning_parallel.schedules.named import Endless, asynchronous
from lightning_parallel.schedules.simulate import simulate


class Steady(NamedTuple):
    """What the lists cost once the pipeline is full, with updates of one batch each.

    Attributes:
        staleness: by chunk, the updates that a microbatch's gradients are late in the mean: those made between its
            forward and the update that they go into.
        most: by chunk, the most that they are.
        busy: the fraction of the stages' time in which they compute, for equal chunks and backwards of twice the
            forwards.
    """

    staleness: tuple[float, ...]
    most: tuple[int, ...]
    busy: float


_MEASURED = 4  # batches


@lru_cache(maxsize=256)
def steady(shape: VShape, stages: int, microbatches: int, latency: float = 0.0) -> Steady:
    """What the lists of V-Half or V-Min cost, in batches after the fill.

    Twice as many microbatches as stages are enough for a stage to come back, within a batch, to the block that is
    repeated. From there on a batch's beginning and end are the same, however long its middle is: as many microbatches
    are late, and stages wait as long. So no longer batch needs to be counted out, unless messages take time.

    Args:
        latency: of a message, in forwards of a chunk.
    """
    if microbatches > (enough := 2 * stages) and not latency:
        found = steady(shape, stages, enough)
        waits = enough * (1 / found.busy - 1)  # in microbatches' time, for each batch
        late_ones = tuple(each * enough / microbatches for each in found.staleness)
        return found._replace(staleness=late_ones, busy=microbatches / (microbatches + waits))
    fill = 3 + 4 * stages // microbatches
    made = asynchronous(stages, microbatches, fill + _MEASURED + fill, schedule=shape)
    counted = range(fill * microbatches, (fill + _MEASURED) * microbatches)
    late: dict[int, list[int]] = {}
    for actions in made:
        steps: Counter[int] = Counter()
        for action in actions:
            if isinstance(action, StepOfChunk):
                steps[action.chunk] += 1
            elif isinstance(action, Forward) and action.microbatch in counted:
                update = action.microbatch // microbatches
                late.setdefault(action.chunk, []).append(update - steps[action.chunk])
    chunks = range(2 * stages)
    ends = {
        timed.action.microbatch: timed.end
        for timed in simulate(made, latency=latency).rows[-1]
        if isinstance(timed.action, Forward) and timed.action.chunk == chunks[-1]
    }
    period = (ends[counted[-1]] - ends[counted[0] - 1]) / _MEASURED
    return Steady(
        tuple(sum(late[chunk]) / len(late[chunk]) for chunk in chunks),
        tuple(max(late[chunk]) for chunk in chunks),
        PERIOD * microbatches / period,
    )


def mean_ahead(schedule: Endless, stages: int, chunk: int, microbatches: int, extra_in_flight: int = 0) -> float:
    """By how many microbatches a chunk's forwards are ahead of the updates that they would read if nothing was late, in
    the mean and once the pipeline is full."""
    if schedule == "1f1b" or stages == 1:
        return AsyncOneFOneB(stages, chunk, extra_in_flight).warmup
    return steady(schedule, stages, microbatches).staleness[chunk] * microbatches
