"""What a schedule costs, without a process: time, waiting, activations held; and its clock table as text.

`python -m lightning_parallel.pipeline.schedule` is this module's command line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.schedule import (
    SYNCHRONOUS,
    Action,
    AsyncOneFOneB,
    Backward,
    Forward,
    Schedule,
    Step,
    asynchronous,
    dependency_order,
    source,
    validate,
)


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and when it runs, in the unit of the durations given to `simulate`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule with the times of its actions; the first starts at 0."""

    rows: list[list[Timed]]
    """One list a stage, in the order of the schedule."""

    @property
    def makespan(self) -> float:
        """Time at which the last stage is done."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy(self) -> list[float]:
        """Time in which each stage computes (forwards, backwards and steps)."""
        return [sum(timed.end - timed.start for timed in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """Fraction of stages x makespan in which a stage waits; fill and drain included."""
        return 1 - sum(self.busy) / (len(self.rows) * self.makespan)

    @property
    def peak_activations(self) -> list[int]:
        """Most microbatches whose activations each stage holds at once: forward begun, backward not done."""
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

        From the last stage's to start its backwards until the first runs out of forwards: the asynchronous
        schedule between its fill and its drain. None where a stage runs out of forwards before another starts
        its backwards, as in one round of a synchronous schedule.
        """
        begin = max(next(t.start for t in row if isinstance(t.action, Backward)) for row in self.rows)
        end = min(next(t.end for t in reversed(row) if isinstance(t.action, Forward)) for row in self.rows)
        return (begin, end) if begin < end else None

    def utilisation(self, begin: float, end: float) -> float:
        """Fraction of the time from `begin` to `end` in which the stages compute, in the mean over them."""
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
        schedule: one list of actions a stage.
        forward, backward, step: duration of an action, for all stages or one a stage, in any unit of time.
        latency: time from the end of an action until its message can be used by the neighbour. Messages
            overlap with computing and with each other.

    Raises:
        ValueError: a duration that is not positive (`step`, `latency`: negative) or a wrong number of them; a
            schedule that deadlocks.
    """
    durations = {
        Forward: _durations("forward", forward, schedule),
        Backward: _durations("backward", backward, schedule),
        Step: _durations("step", step, schedule, allow_zero=True),
    }
    if latency < 0:
        raise ValueError(f"latency={latency}: give 0 or more")
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
        raise ValueError(f"{name}={value}: give one number, or one for each of the {len(schedule)} stages")
    if any(v < 0 or (v == 0 and not allow_zero) for v in values):
        raise ValueError(f"{name}={value}: durations must be {'0 or more' if allow_zero else 'above 0'}")
    return values


def bubble(name: str, stages: int, microbatches: int) -> float:
    """Bubble fraction by theory: equal stages, messages that take no time.

    "async" is the steady state, without the fill and the drains.
    """
    bubbles = {
        "naive": (stages - 1) / stages,
        "gpipe": (stages - 1) / (microbatches + stages - 1),
        "1f1b": (stages - 1) / (microbatches + stages - 1),
        "async": 0.0,
    }
    if name not in bubbles:
        raise ValueError(f"schedule={name!r}: give one of {', '.join(bubbles)}")
    return bubbles[name]


def asynchronous_utilisation(
    stages: int, extra_in_flight: int = 0, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0
) -> float:
    """Steady utilisation of the asynchronous schedule by theory, for equal stages; from `AsyncOneFOneB`."""
    work = forward + backward
    loop = (stages * work + 2 * (stages - 1) * latency) / (1 + (stages - 1) * (1 + extra_in_flight))
    return work / max(work, loop)


def render(schedule: Schedule | Simulation, *, unit: float | None = None, width: int | None = None) -> str:
    """The clock table as text: a row a stage, time to the right.

    `F2` starts the forward and `B2` the backward of microbatch 2, `=` continues it, `.` is waiting, `|` ends
    a step.

    Args:
        schedule: a simulation, or a schedule to be simulated with `simulate`'s defaults.
        unit: time per column; by default the shortest forward or backward, so that each has a column.
        width: most characters in a line; a longer table is cut, and ends with `...`.
    """
    simulation = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    computed = [t for row in simulation.rows for t in row if not isinstance(t.action, Step)]
    if unit is None:
        unit = min(t.end - t.start for t in computed)
    digits = len(str(max(t.action.microbatch for t in computed if not isinstance(t.action, Step))))
    columns = max(1, math.ceil(simulation.makespan / unit - 1e-6))
    lines = []
    for s, row in enumerate(simulation.rows):
        cells, separators = ["."] * columns, [" "] * columns
        for t in row:
            # A column shows what runs at its middle: this action runs in the columns from first to beyond -
            # 1.
            first, beyond = (max(0, math.ceil(time / unit - 0.5 - 1e-6)) for time in (t.start, t.end))
            if isinstance(t.action, Step):
                label = "S"
                separators[max(0, beyond - 1)] = "|"
            else:
                label = f"{'F' if isinstance(t.action, Forward) else 'B'}{t.action.microbatch}"
            cells[first:beyond] = ([label] + ["=" * len(label)] * columns)[: beyond - first]
        body = "".join(f"{cell:>{digits + 1}}{end}" for cell, end in zip(cells, separators, strict=True))
        line = f"stage {s:<{len(str(len(simulation.rows) - 1))}} | {body}".rstrip()
        lines.append(line if width is None or len(line) <= width else line[: width - 4] + " ...")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: draw a schedule; print its bubble, by theory and simulated, and the activations held."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_parallel.pipeline",
        description="Draw a pipeline schedule as text and print its bubble and the activations held.",
    )
    parser.add_argument("schedule", choices=[*SYNCHRONOUS, "async"])
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, help="per update (default: 1 for async, else 2 x stages)")
    parser.add_argument("--forward", type=float, default=1.0, help="duration of a forward (default: 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="duration of a backward (default: 2)")
    parser.add_argument("--step", type=float, default=0.0, help="duration of an optimizer step (default: 0)")
    parser.add_argument("--latency", type=float, default=0.0, help="time a message takes (default: 0)")
    parser.add_argument("--updates", type=int, help="async: updates until the drain (default: 3 x stages)")
    parser.add_argument("--extra-in-flight", type=int, help="async: more forwards ahead a link (default: 0)")
    parser.add_argument("--unit", type=float, help="time per column (default: that of the shortest action)")
    parser.add_argument("--width", type=int, help="cut the table at so many characters")
    options = parser.parse_args(arguments)
    try:
        print(_describe(options))
    except ValueError as error:
        parser.error(str(error))


def _describe(options: argparse.Namespace) -> str:
    name, stages = options.schedule, options.stages
    if name == "async":
        microbatches = 1 if options.microbatches is None else options.microbatches
        updates = 3 * stages if options.updates is None else options.updates
        extra = options.extra_in_flight or 0
        schedule = asynchronous(stages, microbatches, updates, extra)
    else:
        if options.updates is not None or options.extra_in_flight is not None:
            raise ValueError(f"schedule={name}: --updates and --extra-in-flight belong to async")
        microbatches = 2 * stages if options.microbatches is None else options.microbatches
        schedule = SYNCHRONOUS[name](stages, microbatches)
    validate(schedule)
    simulation = simulate(schedule, options.forward, options.backward, options.step, options.latency)
    theory = bubble(name, stages, microbatches)
    lines = [
        f"{name}: {stages} stages, {microbatches} microbatches per update",
        "",
        render(simulation, unit=options.unit, width=options.width),
        "",
        f"makespan          {simulation.makespan:g}",
        f"bubble            {simulation.bubble:.3f} simulated, {theory:.3f} by theory"
        + (" (steady state; simulated with fill and drain)" if name == "async" else ""),
        f"activations held  {' '.join(map(str, simulation.peak_activations))} microbatches, stage by stage",
    ]
    if name == "async":
        steady = simulation.steady
        simulated = "(too few updates)" if steady is None else f"{simulation.utilisation(*steady):.3f}"
        expected = asynchronous_utilisation(stages, extra, options.forward, options.backward, options.latency)
        means = [AsyncOneFOneB(stages, s, extra).warmup / microbatches for s in range(stages)]
        lines += [
            f"stages busy       {simulated} simulated in the steady state, {expected:.3f} by theory",
            f"mean staleness    {' '.join(f'{mean:.3g}' for mean in means)} updates, stage by stage",
        ]
    return "\n".join(lines)
