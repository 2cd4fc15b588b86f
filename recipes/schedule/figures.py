"""Figures of a schedule that no run needs: those of the asynchronous one, and the microbatches that stages hold."""

from __future__ import annotations

from lightning_parallel.schedules.actions import Action, Backward, BackwardInput, Forward, Schedule, placement
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.generators import check_sizes
from lightning_parallel.schedules.simulate import Simulation, most_held


def asynchronous(stages: int, microbatches: int, updates: int, extra_in_flight: int = 0) -> Schedule:
    """`updates` updates of `microbatches` each by `AsyncOneFOneB`, then the drain."""
    check_sizes(stages, microbatches)
    if updates < 1:
        raise ValueError(f"updates={updates}: give at least one update.")
    schedule: Schedule = []
    for s in range(stages):
        stage = AsyncOneFOneB(stages, s, extra_in_flight)
        actions: list[Action] = []
        for _ in range(updates):
            actions += stage.feed(microbatches)
        schedule.append([*actions, *stage.drain()])
    return schedule


def asynchronous_utilisation(
    stages: int, extra_in_flight: int = 0, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0
) -> float:
    """The steady utilisation of the asynchronous schedule by theory, for equal stages; derived in `AsyncOneFOneB`."""
    work = forward + backward
    loop = (stages * work + 2 * (stages - 1) * latency) / (1 + (stages - 1) * (1 + extra_in_flight))
    return work / max(work, loop)


def steady(simulation: Simulation) -> tuple[float, float] | None:
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


def peak_activations(schedule: Schedule) -> list[int]:
    """The most microbatches whose activations each stage holds at once: forward begun, backward not done. On a stage
    with several chunks they count for each chunk."""
    chunks = len(placement(schedule))
    return [most_held(actions, [1] * chunks, [1] * chunks) for actions in schedule]
