"""Schedules of two chunks a stage in a V, for any limit of activations: ZB-V, V-Half, V-Min, and what lies between.

A microbatch goes from the last stage to the first one and back, so the stage with the loss has the input too. Backwards
come in two halves, and second halves, for which nobody waits, fill gaps (zero bubble: arXiv:2401.10241).

**A block** (arXiv:2405.15362) is what all stages do for one microbatch. It is repeated every six clocks, which is what
the three actions of two chunks take, so in the middle of a batch no stage waits. Before the turn a microbatch takes one
clock from a stage to the next, and after it ``hop`` clocks; so do gradients. Here is a block of 3 stages with a hop of
1; ``a`` is a stage's first chunk, ``I`` and ``W`` the halves of a backward::

    stage 0 |   .   . F0a F0b   .   .   .   .   .   . I0b I0a W0a W0b   .
    stage 1 |   . F0a   .   . F0b   .   .   .   . I0b   . W0b I0a   . W0a
    stage 2 | F0a   .   .   .   . F0b   .   . I0b   . W0b   .   . B0a ===

The longer the hops, the longer activations are held, and the fewer stages wait when a batch begins and ends. Of what
the first stage of 1F1B holds, every stage holds about::

    hop 1, V-Min     1/3      hop 3            2/3
    hop 2, V-Half    1/2      hop 5, ZB-V      all

**A list** is that of the blocks of a batch, in the order of their clocks. Then the gaps at its ends are filled: where
a stage would wait, it takes the next action that can run and keeps within the limit (:func:`_filled`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

from lightning_parallel.schedules.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    OnChunk,
    Schedule,
    Step,
    needed,
    sent,
)
from lightning_parallel.schedules.generators import refuse_below
from lightning_parallel.settings import binary_size

_PERIOD = 6  # clocks from a block to the next: three actions of two chunks
_V_MIN, _V_HALF, _ZB_V = 1, 2, 5  # hops


def zbv(stages: int, microbatches: int) -> Schedule:
    """ZB-V (arXiv:2405.15362): the smallest bubble, with the activations of 1F1B's first stage on every stage.

    Each stage but the last begins a clock after the stage that follows it, and ends a clock after it too: the lists of
    a batch form a parallelogram. So the next batch fills the time in which a stage waits at a batch's end, if nothing
    makes all stages wait for each other. Where forward, first and second half take equal times, no stage waits in the
    middle.

    2 stages, 4 microbatches; ``a`` is a stage's first chunk, ``I`` and ``W`` the halves of a backward:

        stage 0 |   . F0a F0b F1a F1b I0b I0a W0b W0a F2a F2b I1b I1a W1b W1a F3a F3b I2b I2a I3b I3a W2b W2a W3b W3a|
        stage 1 | F0a F1a F2a F0b I0b W0b F1b I1b B0a === W1b F3a F2b I2b B1a === W2b F3b I3b B2a === B3a === W3b|  .
    """
    return v_shaped(stages, microbatches)


def vhalf(stages: int, microbatches: int) -> Schedule:
    """V-Half (arXiv:2405.15362): about half of the activations of `zbv`, and a bubble between its and `one_f_one_b`'s.

    With 8 stages and 16 microbatches it holds 5 microbatches' activations for 8, and stages compute 85 % of the time,
    for 93 % and 70 %.
    """
    return _within(stages, microbatches, _least(stages, _V_HALF))


def vmin(stages: int, microbatches: int) -> Schedule:
    """V-Min (arXiv:2405.15362): about a third of the activations of `zbv`, and a bubble smaller than `one_f_one_b`'s
    where forward, first and second half take equal times.

    With 8 stages and 16 microbatches it holds 4 microbatches' activations for 8, and stages compute 78 % of the time,
    for 93 % and 70 %.
    """
    return _within(stages, microbatches, _least(stages, _V_MIN))


def v_shaped(stages: int, microbatches: int, activation_memory: float = 1.0) -> Schedule:
    """A schedule in a V that holds no more than a limit. The more it may hold, the smaller is its bubble.

    Args:
        activation_memory: the most that a stage may hold, as a part of what the first stage of `one_f_one_b` holds.

    Raises:
        ValueError: V-Min needs more.
    """
    refuse_below(1, stages=stages, microbatches=microbatches)
    limit = int(activation_memory * 2 * stages + 1e-9)
    least = _least(stages, _V_MIN)
    if limit < least:
        raise ValueError(
            f"activation_memory={activation_memory:g}: V-Min, which holds the least, holds {least / (2 * stages):.3f} "
            f"with {stages} stages. Give that, or more."
        )
    return _within(stages, microbatches, limit)


def largest_within(stages: int, microbatches: int, limit: int, nbytes: Callable[[Schedule], int]) -> float:
    """The ``activation_memory`` for :func:`v_shaped` with which its lists hold at most ``limit`` bytes on each stage.

    Args:
        nbytes: the bytes that the fullest stage holds with some lists.

    Raises:
        ValueError: V-Min holds more.
    """
    chunks = range(_least(stages, _V_MIN), 2 * stages + 1)
    found = bisect_right(chunks, limit, key=lambda most: nbytes(_within(stages, microbatches, most)))
    if not found:
        raise ValueError(f"V-Min holds {binary_size(nbytes(vmin(stages, microbatches)))} on a stage.")
    return chunks[found - 1] / (2 * stages)


# -- blocks ------------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """The clocks at which the chunks run for microbatch 0, by chunk."""

    forward: list[int]
    backward: list[int]  # first halves
    weight: list[int]  # second halves; the first chunk's backward is whole

    def held(self) -> int:
        """The most chunks of which a stage holds activations."""
        stages = len(self.forward) // 2
        return max(
            sum((clock - self.forward[j]) // _PERIOD - (clock - self.weight[j]) // _PERIOD for j in own)
            for own in map(_chunks, [stages] * stages, range(stages))
            for clock in (self.forward[j] for j in own)
        )


def _chunks(stages: int, stage: int) -> tuple[int, int]:
    """A stage's chunks, before the turn and after it."""
    return stages - 1 - stage, stages + stage


@cache
def _blocks(stages: int, hop: int) -> list[_Block]:
    """The blocks with a hop, those with the shortest way first.

    A block is one if no stage has two actions at once. Where hops alone would bring that about, a microbatch waits at a
    turn.
    """
    waits = sorted(product(range(_PERIOD), repeat=3), key=sum)
    return [block for wait in waits if (block := _block(stages, hop, *wait))]


def _block(stages: int, hop: int, at_turn: int, at_loss: int, at_last_turn: int) -> _Block | None:
    chunks = 2 * stages
    forward, backward, weight = ([0] * chunks for _ in range(3))
    for j in range(1, chunks):
        forward[j] = forward[j - 1] + (1 if j < stages else 1 + at_turn if j == stages else hop)
    backward[-1] = forward[-1] + 1 + at_loss
    for j in reversed(range(chunks - 1)):
        backward[j] = backward[j + 1] + (1 if j >= stages else 1 + at_last_turn if j == stages - 1 else hop)
    for stage in range(stages):
        own = _chunks(stages, stage)
        taken = {clock % _PERIOD for j in own for clock in (forward[j], backward[j])}
        if len(taken) < 4:
            return None
        free = permutations(set(range(_PERIOD)) - taken)
        after = [
            [backward[j] + 1 + (at - backward[j] - 1) % _PERIOD for j, at in zip(own, each, strict=True)]
            for each in free
        ]
        for j, clock in zip(own, min(after, key=sum), strict=True):
            weight[j] = clock
    weight[0] = backward[0]
    return _Block(forward, backward, weight)


def _least(stages: int, hop: int) -> int:
    """The fewest chunks whose activations a block with a hop holds on a stage."""
    refuse_below(1, stages=stages)
    return min(block.held() for block in _blocks(stages, hop))


# -- lists -------------------------------------------------------------------------------------------------------------


def _within(stages: int, microbatches: int, limit: int) -> Schedule:
    """The lists of the block with the longest hops, and then the shortest way, of those that hold the activations of at
    most ``limit`` chunks on a stage."""
    refuse_below(1, microbatches=microbatches)
    hops = (_ZB_V, 3, _V_HALF, _V_MIN)
    block = next(block for hop in hops for block in _blocks(stages, hop) if block.held() <= limit)
    lists = [[*_in_order(block, _chunks(stages, stage), microbatches)] for stage in range(stages)]
    return [[*actions, Step(stage, 0)] for stage, actions in enumerate(_filled(lists, limit))]


def _in_order(block: _Block, chunks: Sequence[int], microbatches: int) -> list[OnChunk]:
    """A stage's actions in the order of their clocks."""
    timed: list[tuple[int, OnChunk]] = []
    for k, j in product(range(microbatches), chunks):
        timed.append((block.forward[j], Forward(j, k)))
        if j == 0:  # nobody waits for the first half
            timed.append((block.backward[j], Backward(j, k)))
        else:
            timed += [(block.backward[j], BackwardInput(j, k)), (block.weight[j], BackwardWeight(j, k))]
    return [action for _, action in sorted(timed, key=lambda each: each[0] + _PERIOD * each[1].microbatch)]


def _filled(lists: Sequence[Sequence[OnChunk]], limit: int) -> list[list[OnChunk]]:
    """The lists as they run clock by clock, where a stage that would wait takes a later action that can run."""
    stages, chunks = [_Stage([*actions], limit) for actions in lists], 2 * len(lists)
    arrivals: dict[Message, int] = {}  # the clocks from which messages are there
    clock = 0
    while any(stage.left for stage in stages):
        here = {message for message, arrival in arrivals.items() if arrival <= clock}
        for stage in stages:
            begun = stage.begin(clock, here, chunks) if stage.free_from <= clock else None
            if begun and (message := sent(begun, chunks)):
                arrivals[message] = stage.free_from
        clock += 1
    return [stage.begun for stage in stages]


@dataclass
class _Stage:
    """A stage that runs its list.

    Attributes:
        left: the actions that it hasn't begun, in the order of their blocks.
        limit: the most chunks whose activations it may hold.
        begun: the other actions, in the order in which it has.
        free_from: the clock at which it can begin the next one.
        held: the chunks whose activations it holds.
    """

    left: list[OnChunk]
    limit: int
    begun: list[OnChunk] = field(default_factory=list)
    free_from: int = 0
    held: int = 0

    def begin(self, clock: int, messages: Set[Message], chunks: int) -> OnChunk | None:
        """Begin the first action that can run; None if there is none."""
        index = self._next(messages, chunks)
        if index is None:
            return None
        action = self.left.pop(index)
        self.begun.append(action)
        self.free_from = clock + (2 if isinstance(action, Backward) else 1)
        self.held += _holds(action)
        return action

    def _next(self, messages: Set[Message], chunks: int) -> int | None:
        """The index of the first action that can run. A forward must leave room for what it overtakes. After the last
        forward first halves come before second ones: other stages wait for them."""
        overtaken: set[OnChunk] = set()
        kinds: set[tuple[type[OnChunk], int]] = set()  # of what is overtaken, with its chunk
        held = most = self.held
        second_half: int | None = None
        for index, action in enumerate(self.left):
            kind, place = (type(action), action.chunk), (action.chunk, action.microbatch)
            message = needed(action, chunks)
            is_free = kind not in kinds and overtaken.isdisjoint((Forward(*place), BackwardInput(*place)))
            is_within = not isinstance(action, Forward) or most < self.limit
            if is_free and is_within and (message is None or message in messages):
                if not isinstance(action, BackwardWeight) or self._has_forwards_left():
                    return index
                second_half = index if second_half is None else second_half
            overtaken.add(action)
            kinds.add(kind)
            if len(kinds) == 6:  # all that there are
                break
            held += _holds(action)
            most = max(most, held)
        return second_half

    def _has_forwards_left(self) -> bool:
        return any(isinstance(action, Forward) for action in self.left)


def _holds(action: OnChunk) -> int:
    """How many more chunks' activations are held after an action."""
    return 1 if isinstance(action, Forward) else -isinstance(action, Backward | BackwardWeight)
