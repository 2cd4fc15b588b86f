"""Pipeline schedules: for each stage, the list of what it computes, in order.

A schedule is data. The generators here are pure functions of integers; below one they raise a ValueError. The same
lists are checked (``checks.py``), simulated (``simulate.py``), and run (``engine.py``). Messages are implied: the
forward of a microbatch on chunk c needs the activation that its forward on chunk c - 1 sent, and its backward needs the
gradient that its backward on chunk c + 1 sent (``actions.py``).

In the clock tables below time runs to the right and a row is a stage. ``F2`` is the forward and ``B2`` the backward of
microbatch 2; ``.`` is a clock without work, and ``|`` the optimizer step. With several chunks a stage, ``F2b`` is that
of the stage's second chunk. A forward is one clock long, and so is a whole backward. Where backwards are in halves,
each half is, and ``=`` continues a whole one.

``python -m tools.schedule 1f1b --stages 4 --microbatches 8`` draws one for other sizes.

A new schedule is one more generator. ``PipelineStrategy(schedule=...)`` takes it; listed in ``named.py``, it has a name
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from math import inf
from typing import TypeAlias

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
)

Generator: TypeAlias = Callable[[int, int], Schedule]  # of a number of stages and a number of microbatches


# -- generators --------------------------------------------------------------------------------------------------


def naive(stages: int, microbatches: int = 1) -> Schedule:
    """One microbatch at a time: forward through all stages, backward through all stages, then the next.

    It holds the activations of one microbatch. At any time all stages but one wait, whatever `microbatches` is.

    3 stages, 2 microbatches:

        stage 0 | F0  .  .  .  . B0 F1  .  .  .  . B1|
        stage 1 |  . F0  .  . B0  .  . F1  .  . B1| .
        stage 2 |  .  . F0 B0  .  .  .  . F1 B1| .  .
    """
    return _one_chunk_each(stages, microbatches, lambda s: 0)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (arXiv:1811.06965): the forwards of all microbatches, then the backwards of all microbatches.

    Every stage holds the activations of all microbatches when its last forward is done. The backwards run in the order
    of the forwards (not reversed), so gradients are summed in the same order as by `one_f_one_b` and by a loop over the
    microbatches.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3|
        stage 1 |  . F0 F1 F2 F3  .  . B0 B1 B2 B3| .
        stage 2 |  .  . F0 F1 F2 F3 B0 B1 B2 B3| .  .
    """
    return _one_chunk_each(stages, microbatches, lambda s: microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush (PipeDream-Flush, DAPPLE): each backward as early as it can run.

    Stage s starts with stages - 1 - s warm-up forwards. Then one forward and one backward alternate, and at the end the
    remaining backwards run. Bubble and gradients are those of `gpipe`. Stage s holds min(stages - s, microbatches)
    activations in place of `microbatches`. With fewer microbatches than stages the early stages have no steady phase.

    3 stages, 4 microbatches:

        stage 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3|
        stage 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3| .
        stage 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3| .  .
    """
    return _one_chunk_each(stages, microbatches, lambda s: stages - 1 - s)


def _one_chunk_each(stages: int, microbatches: int, ahead: Callable[[int], int]) -> Schedule:
    """The schedule in which stage s runs the chunk s, and ``ahead(s)`` forwards before its first backward."""
    refuse_below(1, stages=stages, microbatches=microbatches)
    schedule: Schedule = []
    for s in range(stages):
        forwards = [Forward(s, k) for k in range(microbatches)]
        backwards = [Backward(s, k) for k in range(microbatches)]
        schedule.append([*_in_turn(forwards, backwards, ahead(s)), Step(s, 0)])
    return schedule


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` forwards (warm-up), then a forward and a backward in turn (steady state), then the other backwards
    (cool-down)."""
    steady = [*zip(forwards[ahead:], backwards, strict=False)]
    return [*forwards[:ahead], *chain.from_iterable(steady), *backwards[len(steady) :]]


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, arXiv:2104.04473): stage s runs the chunks s, s + stages, s + 2 stages, ...

    A microbatch passes all stages `chunks` times. So a stage starts its work after a fraction of a whole stage's
    forward, and the bubble is about 1 / `chunks` of that of `one_f_one_b`. Microbatches go in rounds of `stages` or a
    few more: all of a round through the first chunks, then all of them through the second ones. A stage begins with
    forwards until the first gradient is back. It then holds (chunks - 1) rounds and 2 (stages - 1 - s) + 1 more
    microbatches, each of one chunk: more than with `one_f_one_b`. The last stage sends to the first one.

    2 stages, 4 microbatches, 2 chunks a stage; ``a`` is a stage's first chunk:

        stage 0 | F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a   . B2b   . B3b B2a B3a|
        stage 1 |   . F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a|  .
    """
    refuse_below(1, stages=stages, microbatches=microbatches, chunks=chunks)
    rounds = _rounds(stages, microbatches)
    forwards = [(chunk, k) for numbers in rounds for chunk in range(chunks) for k in numbers]
    backwards = [(chunk, k) for numbers in rounds for chunk in reversed(range(chunks)) for k in numbers]
    schedule: Schedule = []
    for s in range(stages):
        ahead = (chunks - 1) * len(rounds[0]) + 2 * (stages - 1 - s)
        f = [Forward(s + chunk * stages, k) for chunk, k in forwards]
        b = [Backward(s + chunk * stages, k) for chunk, k in backwards]
        schedule.append([*_in_turn(f, b, ahead), Step(s, 0)])
    return schedule


def _rounds(stages: int, microbatches: int) -> list[range]:
    """The microbatches in rounds of nearly equal size. In a round shorter than the number of stages, the first stage
    would wait until the round's first microbatch comes back from the last stage."""
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(starts)]


def one_at_a_time(actions: Sequence[Action]) -> list[Action]:
    """A stage's actions for an update in another order: each microbatch goes through all chunks and back before the
    next one begins. If all stages take this order, there is one message under way at a time."""

    def order(action: Action) -> tuple[float, ...]:
        if isinstance(action, Step):
            return (inf,)
        if isinstance(action, Forward):
            return action.microbatch, 0, action.chunk
        return action.microbatch, 1, -action.chunk, isinstance(action, BackwardWeight)

    return sorted(actions, key=order)


def refuse_below(least: int, **numbers: int) -> None:
    """Refuse numbers that are too small, by their names."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name}={number}: give at least {least}.")
