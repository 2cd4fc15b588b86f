"""``schedule="auto"``: the fastest schedule for a model, by simulation, of those whose activations fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_parallel.pipeline.actions import BackwardWeight, Forward, Schedule
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.simulate import most_held, simulate

# How long a backward in halves takes, in whole ones: between a Llama block's and an encoder layer's in docs/figures.md.
_HALVES = 1.045

_ALIKE = 0.01  # of the stages' time: schedules that differ by less are equally fast


@dataclass(frozen=True)
class Estimate:
    """What a schedule costs with a model.

    Attributes:
        busy: the fraction of a batch's time in which stages compute, the mean over them, if all begin and end the batch
            together. What actions and backwards in halves take on top doesn't count.
        held: the bytes of activations that the fullest stage holds at most.
    """

    busy: float
    held: int


def estimate(
    schedule: Schedule, parts: Partition, overhead: float, *, halves: bool, recompute: bool = False
) -> Estimate:
    """What a schedule costs with a model that is cut for it.

    Args:
        schedule: its lists.
        parts: the model's chunks, and what each computes and holds.
        overhead: what each action takes besides what it computes, and each message, in the unit of ``parts.work``.
        halves: second halves of backwards run where the schedule has them, not with the first ones.
        recompute: layers run again in the backward: in the first half, if it has two.
    """
    split = halves and any(isinstance(action, BackwardWeight) for actions in schedule for action in actions)
    work = [max(each, 1) for each in parts.work]  # torch has no formula for what is 0
    backward, actions = (_HALVES, 2) if split else (1.0, 1)  # in whole backwards; how many actions it is
    simulation = simulate(
        schedule,
        [each + overhead for each in work],
        [(2 * backward + recompute) * each + actions * overhead for each in work],
        latency=overhead,
        second_half=0.0 if not halves else 1 / 3 if recompute else 0.5,
    )
    microbatches = len({a.microbatch for a in schedule[0] if isinstance(a, Forward)})
    # Between the halves, the inputs of matmuls wait, and the gradients of what they return.
    between = parts.computed if halves else None
    held = max(most_held(actions, parts.held, between) for actions in schedule)
    computing = (3 + recompute) * microbatches * sum(work) / parts.stages
    return Estimate(computing / simulation.makespan, held)


def choose(estimates: Mapping[str, Estimate], free: int) -> str:
    """The fastest that fits. Of those that are nearly as fast, the one that holds least, and then the plainest. If none
    fits, the one that holds least of all.

    Args:
        estimates: by the schedules' names, the plainest first.
        free: the bytes that a stage has for activations.
    """
    least = min(each.held for each in estimates.values())
    fitting = {name: each for name, each in estimates.items() if each.held <= max(least, free)}
    fastest = max(each.busy for each in fitting.values())
    alike = {name: each for name, each in fitting.items() if each.busy >= fastest - _ALIKE}
    return min(alike, key=lambda name: alike[name].held)


def reason(chosen: str, estimates: Mapping[str, Estimate], free: int, microbatches: int) -> str:
    """The choice and its reason, as text. Arguments as of :func:`choose`; ``microbatches``: of a batch."""
    figures = ", ".join(
        f"{each.busy:.0%} of the time with {name!r} ({binary_size(each.held)} of activations on the fullest stage"
        f"{'' if each.held <= free else ', too much'})"
        for name, each in estimates.items()
    )
    none = " None fits: this one holds least." if all(each.held > free for each in estimates.values()) else ""
    return (
        f"schedule='auto' takes {chosen!r}. By simulation with {microbatches} microbatches, stages compute {figures}. "
        f"About {binary_size(free)} are there for activations.{none}"
    )


def binary_size(nbytes: int) -> str:
    """Bytes as a text, in units of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1024:.3g} KiB"
