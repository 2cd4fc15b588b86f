"""What a schedule costs, for its table: activations held, and how much stages compute in the steady state."""

from __future__ import annotations

from lightning_parallel.schedules.actions import Backward, BackwardInput, Forward, Schedule, placement
from lightning_parallel.schedules.simulate import Simulation, most_held


def peak_activations(schedule: Schedule) -> list[int]:
    """The most microbatches whose activations each stage holds at once: forward begun, backward not done. On a stage
    with several chunks they count for each chunk."""
    chunks = len(placement(schedule))
    return [most_held(actions, [1] * chunks, [1] * chunks) for actions in schedule]


def full_span(simulation: Simulation) -> tuple[float, float] | None:
    """Begin and end of the time in which all stages run forwards and backwards in turn, or None.

    It begins when the last stage starts its backwards, and ends when the first one runs out of forwards: the
    asynchronous schedule between its fill and its drain. It is None where a stage runs out of forwards before another
    starts its backwards, as in one round of a synchronous schedule.
    """
    rows = simulation.rows
    begin = max(next(t.start for t in row if isinstance(t.action, Backward | BackwardInput)) for row in rows)
    end = min(next(t.end for t in reversed(row) if isinstance(t.action, Forward)) for row in rows)
    return (begin, end) if begin < end else None


def utilisation(simulation: Simulation, begin: float, end: float) -> float:
    """The fraction of the time from `begin` to `end` in which the stages compute, in the mean over them."""
    busy = sum(max(0.0, min(t.end, end) - max(t.start, begin)) for row in simulation.rows for t in row)
    return busy / (len(simulation.rows) * (end - begin))


def asynchronous_utilisation(
    stages: int, extra_in_flight: int = 0, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0
) -> float:
    """The steady utilisation of the asynchronous schedule by theory, for equal stages; derived in `AsyncOneFOneB`."""
    work = forward + backward
    loop = (stages * work + 2 * (stages - 1) * latency) / (1 + (stages - 1) * (1 + extra_in_flight))
    return work / max(work, loop)
