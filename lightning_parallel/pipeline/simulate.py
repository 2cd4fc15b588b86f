"""What a schedule costs, without any process: time, waiting, activations held. ``clock_table.py`` draws it as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.schedule import Action, Backward, Forward, Schedule, Step, dependency_order, source


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and when it runs, in the unit of the durations given to `simulate`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule with the times of its actions. The first one starts at 0.

    Attributes:
        rows: a list for each stage, in the order of the schedule.
    """

    rows: list[list[Timed]]

    @property
    def makespan(self) -> float:
        """The time at which the last stage is done."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy(self) -> list[float]:
        """The time in which each stage computes (forwards, backwards and steps)."""
        return [sum(timed.end - timed.start for timed in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """The fraction of stages x makespan in which a stage waits, fill and drain included."""
        return 1 - sum(self.busy) / (len(self.rows) * self.makespan)

    @property
    def peak_activations(self) -> list[int]:
        """The most microbatches whose activations each stage holds at once: forward begun, backward not done."""
        peaks = []
        for row in self.rows:
            held = peak = 0
            for timed in row:
                held += isinstance(timed.action, Forward) - isinstance(timed.action, Backward)
                peak = max(peak, held)
            peaks.append(peak)
        return peaks

    @property
    def steady(self) -> tuple[float, float] | None:
        """Begin and end of the time in which all stages run forwards and backwards in turn, or None.

        It begins when the last stage starts its backwards, and ends when the first one runs out of forwards: the
        asynchronous schedule between its fill and its drain. It is None where a stage runs out of forwards before
        another starts its backwards, as in one round of a synchronous schedule.
        """
        begin = max(next(t.start for t in row if isinstance(t.action, Backward)) for row in self.rows)
        end = min(next(t.end for t in reversed(row) if isinstance(t.action, Forward)) for row in self.rows)
        return (begin, end) if begin < end else None

    def utilisation(self, begin: float, end: float) -> float:
        """The fraction of the time from `begin` to `end` in which the stages compute, in the mean over them."""
        busy = sum(max(0.0, min(t.end, end) - max(t.start, begin)) for row in self.rows for t in row)
        return busy / (len(self.rows) * (end - begin))


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    step: float | Sequence[float] = 0.0,
    latency: float = 0.0,
) -> Simulation:
    """Run a schedule on paper: every action starts as soon as its stage is free and its message is there.

    Args:
        schedule: a list of actions for each stage.
        forward: the duration of a forward, for all stages or for each, in any unit of time.
        backward: the duration of a backward, in the same unit.
        step: the duration of an update, in the same unit.
        latency: the time from the end of an action until the neighbour can use its message. Messages overlap with
            computing and with each other.

    Raises:
        ValueError: a duration is not positive (`step`, `latency`: negative), there is a wrong number of them, or the
            schedule deadlocks.
    """
    durations = {
        Forward: _durations("forward", forward, schedule),
        Backward: _durations("backward", backward, schedule),
        Step: _durations("step", step, schedule, allow_zero=True),
    }
    if latency < 0:
        raise ValueError(f"latency={latency}: give 0 or more.")
    rows: list[list[Timed]] = [[] for _ in schedule]
    ends: dict[Action, float] = {}
    for action in dependency_order(schedule):
        row = rows[action.stage]
        start = row[-1].end if row else 0.0
        message = source(action, len(schedule))
        if message is not None:
            start = max(start, ends[message] + latency)
        ends[action] = start + durations[type(action)][action.stage]
        row.append(Timed(action, start, ends[action]))
    return Simulation(rows)


def _durations(
    name: str, value: float | Sequence[float], schedule: Schedule, *, allow_zero: bool = False
) -> Sequence[float]:
    values = [float(value)] * len(schedule) if isinstance(value, (int, float)) else value
    if len(values) != len(schedule):
        raise ValueError(f"{name}={value}: give one number, or one for each of the {len(schedule)} stages.")
    if any(v < 0 or (v == 0 and not allow_zero) for v in values):
        raise ValueError(f"{name}={value}: durations must be {'0 or more' if allow_zero else 'above 0'}.")
    return values


def ideal_bubble(schedule: Schedule) -> float:
    """The bubble of a schedule by theory: equal stages, backwards of twice the forwards, messages that take no time.

    For p stages and m microbatches it is (p - 1) / (m + p - 1) for GPipe and 1F1B, and (p - 1) / p for the naive
    schedule. An asynchronous schedule has none in its steady state.
    """
    return simulate(schedule).bubble


def asynchronous_utilisation(
    stages: int, extra_in_flight: int = 0, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0
) -> float:
    """The steady utilisation of the asynchronous schedule by theory, for equal stages; derived in `AsyncOneFOneB`."""
    work = forward + backward
    loop = (stages * work + 2 * (stages - 1) * latency) / (1 + (stages - 1) * (1 + extra_in_flight))
    return work / max(work, loop)
