"""``schedule="auto"``: of some schedules the fastest for a model, on paper, whose activations fit in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.actions import Backward, BackwardWeight, Forward, Schedule
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.simulate import simulate

# What a simulation of equal chunks leaves out: a message, in forwards of a whole stage, and a backward in halves, in
# whole ones. The second was measured on a Llama block and on an encoder layer; docs/figures.md has it.
_LATENCY = 0.05
_HALVES = 1.04

_ALIKE = 0.01  # of the stages' time: schedules that differ by less are equally fast
_USABLE = 0.8  # of the memory: the rest is for what an estimate leaves out


@dataclass(frozen=True)
class Estimate:
    """What a schedule costs with a model.

    Attributes:
        busy: the fraction of the time that stages compute, in the mean, if they wait for each other between batches.
            Of backwards in halves, what these cost more isn't counted.
        held: the bytes of activations that the fullest stage holds at most.
    """

    busy: float
    held: int


def estimate(schedule: Schedule, parts: Partition, halves: bool) -> Estimate:
    """What a schedule costs with a model that is cut for it.

    Args:
        schedule: its lists.
        parts: the model's chunks, and what each computes and holds.
        halves: second halves of backwards run where the schedule has them, not with the first ones.
    """
    split = any(isinstance(action, BackwardWeight) for actions in schedule for action in actions)
    work = parts.work if all(parts.work) else (1,) * parts.chunks  # of what torch has no formula for, nothing is known
    forwards = [parts.stages * each / sum(work) for each in work]  # a whole stage's is 1 in the mean
    cost = _HALVES if split and halves else 1.0
    simulation = simulate(
        schedule,
        forwards,
        [2 * cost * each for each in forwards],
        latency=_LATENCY,
        second_half=0.5 if halves else 0.0,
    )
    microbatches = len({a.microbatch for a in schedule[0] if isinstance(a, Forward)})
    return Estimate(3 * microbatches / simulation.makespan, max(_held(actions, parts.held) for actions in schedule))


def _held(actions: Sequence[object], sizes: Sequence[int]) -> int:
    """The most that a stage holds at once."""
    held = most = 0
    for action in actions:
        if isinstance(action, Forward):
            held += sizes[action.chunk]
            most = max(most, held)
        elif isinstance(action, Backward | BackwardWeight):
            held -= sizes[action.chunk]
    return most


def choose(estimates: Mapping[str, Estimate], free: int) -> str:
    """The fastest that fits; of those that are nearly as fast, the one that holds least. If none fits, that one too.

    Args:
        estimates: by the schedules' names, the plainest first.
        free: the bytes that a stage has for activations.
    """
    least = min(each.held for each in estimates.values())
    fitting = {name: each for name, each in estimates.items() if each.held <= max(least, _USABLE * free)}
    fastest = max(each.busy for each in fitting.values())
    alike = {name: each for name, each in fitting.items() if each.busy >= fastest - _ALIKE}
    return min(alike, key=lambda name: alike[name].held)


def reason(chosen: str, estimates: Mapping[str, Estimate], free: int, microbatches: int) -> str:
    """The choice and why, in a sentence for the start banner."""
    each = "; ".join(
        f"{name} {value.busy:.0%} and {_size(value.held)}{'' if value.held <= _USABLE * free else ', too much'}"
        for name, value in estimates.items()
    )
    return (
        f"schedule='auto' is {chosen!r}: with {microbatches} microbatches, the time that stages compute by simulation, "
        f"and the activations of the fullest one, are {each}, of about {_size(free)} for them."
    )


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1024:.3g} KiB"
