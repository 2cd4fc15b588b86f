"""Schedules of two chunks a stage in a V, for any limit of activations: ZB-V, V-Half, V-Min, and what lies between.

The chunks before the turn lie on the stages from the last to the first, those after it on the way back. So the stage
with the loss has the input too. Backwards come in two halves, and second halves, for which nobody waits, fill gaps
(zero bubble: arXiv:2401.10241).

A *block* (arXiv:2405.15362) is what all stages do for one microbatch. It is repeated every six clocks, which is what
the three actions of two chunks take, so in the middle of a batch no stage waits. Before the turn a microbatch takes one
clock from a stage to the next, and after it ``hop`` clocks. A gradient takes one clock on its way back to the turn, and
``hop`` clocks from there on. Here is a block of 3 stages with a hop of 1; ``a`` is a stage's first chunk, ``I`` and
``W`` the halves of a backward::

    stage 0 |   .   . F0a F0b   .   .   .   .   .   . I0b I0a W0a W0b   .
    stage 1 |   . F0a   .   . F0b   .   .   .   . I0b   . W0b I0a   . W0a
    stage 2 | F0a   .   .   .   . F0b   .   . I0b   . W0b   .   . B0a ===

The longer the hops, the longer activations are held, and the less stages wait when a batch begins and ends. Of what the
first stage of 1F1B holds, every stage of many holds about::

    hop 1, V-Min     1/3      hop 3            2/3
    hop 2, V-Half    1/2      hop 5, ZB-V      all

A stage's list has the actions of all blocks of a batch, in the order of their clocks. Then the gaps at its ends are
filled: where the stage would wait, it takes the next action that can run and keeps within the limit (:func:`_filled`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, permutations, product
from math import ceil, inf
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
from lightning_parallel.schedules.simulate import simulate

_PERIOD = 6  # clocks from a block to the next: three actions of two chunks
_HOP_OF_V_MIN, _HOP_OF_V_HALF = 1, 2
_HOPS = (5, 3, _HOP_OF_V_HALF, _HOP_OF_V_MIN)  # with 4, a stage of four or more would have two actions at once
_TRIED = 3  # blocks of each hop
_COMPARED_TO = 16  # stages; with more it would take seconds


def zbv(stages: int, microbatches: int, activation_memory: float = 1.0) -> Schedule:
    """ZB-V (arXiv:2405.15362): hardly a bubble, with the activations of 1F1B's first stage on every stage.

    Each stage but the last begins a clock after the stage that follows it, and ends a clock after it too: the lists of
    a batch form a parallelogram. So the next batch fills the time in which a stage waits at a batch's end, if nothing
    makes all stages wait for each other. Where forward, first and second half take equal times, no stage waits in the
    middle. With a smaller limit, stages wait at a batch's ends.

    2 stages, 4 microbatches; ``a`` is a stage's first chunk, ``I`` and ``W`` the halves of a backward:

        stage 0 |   . F0a F0b F1a F1b I0b I0a W0b W0a F2a F2b I1b I1a W1b W1a F3a F3b I2b I2a I3b I3a W2b W2a W3b W3a|
        stage 1 | F0a F1a F2a F0b I0b W0b F1b I1b B0a === W1b F3a F2b I2b B1a === W2b F3b I3b B2a === B3a === W3b|  .

    Args:
        activation_memory: the most that a stage may hold, as a part of what the first stage of `one_f_one_b` holds. One
            stage alone holds a microbatch, whatever it may hold.

    Raises:
        ValueError: V-Min holds more.
    """
    refuse_below(1, stages=stages, microbatches=microbatches)
    limit, least = int(activation_memory * 2 * stages + 1e-9), _least(stages, _HOP_OF_V_MIN)
    if limit < least and stages > 1:
        raise ValueError(
            f"activation_memory={activation_memory:g}: with {stages} stages give at least "
            f"{ceil(1000 * least / (2 * stages)) / 1000:g}, which V-Min holds, or more stages."
        )
    return _within(stages, microbatches, max(limit, least))


def vhalf(stages: int, microbatches: int) -> Schedule:
    """V-Half (arXiv:2405.15362): stages // 2 + 1 microbatches' activations where `zbv` holds as many as there are
    stages, and a bubble between its and `one_f_one_b`'s.

    With 8 stages and 16 microbatches, stages compute 85 % of the time, for 93 % and 70 %.
    """
    return _within(stages, microbatches, _least(stages, _HOP_OF_V_HALF))


def vmin(stages: int, microbatches: int) -> Schedule:
    """V-Min (arXiv:2405.15362): ceil((stages + 2) / 3) microbatches' activations where `zbv` holds as many as there are
    stages. Where forward, first and second half take equal times, the bubble is smaller than `one_f_one_b`'s; else it
    may be larger.

    With 8 stages and 16 microbatches, stages compute 81 % of the time, for 93 % and 70 %.
    """
    return _within(stages, microbatches, _least(stages, _HOP_OF_V_MIN))


def zbv_in_bytes(stages: int, microbatches: int, limit: int, nbytes: Callable[[Schedule], int]) -> Schedule:
    """The lists of :func:`zbv` with the largest part of its activations that is within ``limit`` bytes on all stages;
    V-Min's if these hold more, too.

    Args:
        nbytes: the bytes that the fullest stage holds with some lists.
    """
    refuse_below(1, stages=stages, microbatches=microbatches)
    chunks = range(_least(stages, _HOP_OF_V_MIN), 2 * stages + 1)
    found = bisect_right(chunks, limit, key=lambda most: nbytes(_within(stages, microbatches, most)))
    return _within(stages, microbatches, chunks[max(found - 1, 0)])


def _within(stages: int, microbatches: int, limit: int) -> Schedule:
    """The lists that end first, of some blocks that hold the activations of at most ``limit`` chunks on a stage. There
    is one that does."""
    refuse_below(1, microbatches=microbatches)
    return _lists(_chosen(stages, min(microbatches, 2 * stages), limit), microbatches, limit)


@cache
def _chosen(stages: int, microbatches: int, limit: int) -> _Block:
    """The block whose lists end first; of several, the one with the longest hops."""
    blocks = [block for hop in _HOPS for block in _fitting(stages, hop, limit)]
    if stages > _COMPARED_TO:
        return blocks[0]
    return min(blocks, key=lambda block: simulate(_lists(block, microbatches, limit)).makespan)


# -- blocks ------------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """The clocks at which the chunks run for microbatch 0, by chunk."""

    forward: list[int]
    backward: list[int]  # first halves
    weight: list[int]  # second halves; the first chunk's backward is whole

    def held(self) -> int:
        """The most chunks whose activations a stage holds."""
        stages, most = len(self.forward) // 2, 0
        for stage in range(stages):
            own = _chunks(stages, stage)
            for clock in (self.forward[j] for j in own):
                begun = sum((clock - self.forward[j]) // _PERIOD for j in own)
                most = max(most, begun - sum((clock - self.weight[j]) // _PERIOD for j in own))
        return most


def _chunks(stages: int, stage: int) -> tuple[int, int]:
    """A stage's chunks, before the turn and after it."""
    return stages - 1 - stage, stages + stage


@cache
def _blocks(stages: int, hop: int) -> list[_Block]:
    """The blocks with a hop, those with the shortest waits first. Clocks form a block if no stage has two actions at
    once. Where hops alone would bring that about, a microbatch waits at a turn."""
    waits = sorted(product(range(_PERIOD), repeat=3), key=sum)
    return [block for wait in waits if (block := _block(stages, hop, *wait))]


def _fitting(stages: int, hop: int, limit: int) -> Iterator[_Block]:
    """Some blocks with a hop that hold no more than a limit."""
    return islice((block for block in _blocks(stages, hop) if block.held() <= limit), _TRIED)


def _block(stages: int, hop: int, wait_at_turn: int, wait_at_loss: int, wait_at_last_turn: int) -> _Block | None:
    """The block with a hop and these waits; None if a stage would have two actions at once."""
    chunks = 2 * stages
    forward, backward, weight = ([0] * chunks for _ in range(3))
    for j in range(1, chunks):
        forward[j] = forward[j - 1] + (1 if j < stages else 1 + wait_at_turn if j == stages else hop)
    backward[-1] = forward[-1] + 1 + wait_at_loss
    for j in reversed(range(chunks - 1)):
        backward[j] = backward[j + 1] + (1 if j >= stages else 1 + wait_at_last_turn if j == stages - 1 else hop)
    for stage in range(stages):
        own = _chunks(stages, stage)
        taken = {clock % _PERIOD for j in own for clock in (forward[j], backward[j])}
        if len(taken) < 4:
            return None
        # Second halves take the clocks that are left, as early as they can.
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


def _lists(block: _Block, microbatches: int, limit: int) -> Schedule:
    """The lists of a batch, by the blocks of its microbatches."""
    stages = len(block.forward) // 2
    lists = [_in_order(block, _chunks(stages, stage), microbatches) for stage in range(stages)]
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


def _filled(lists: Sequence[list[OnChunk]], limit: int) -> list[list[OnChunk]]:
    """The lists as they run clock by clock, where a stage that would wait takes a later action that can run."""
    stages, chunks = [_Stage(actions, limit) for actions in lists], 2 * len(lists)
    arrivals: dict[Message, int] = {}  # the clocks from which messages are there
    clock = 0
    while any(stage.left for stage in stages):
        for stage in stages:
            begun = stage.begin(clock, arrivals, chunks) if stage.free_from <= clock else None
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

    def begin(self, clock: int, arrivals: Mapping[Message, int], chunks: int) -> OnChunk | None:
        """Begin the first action that can run; None if there is none. After the last forward, first halves come before
        second ones: other stages wait for them."""
        able = self._able(clock, arrivals, chunks)
        if (first := next(able, None)) is None:
            return None
        if isinstance(self.left[first], BackwardWeight) and not any(isinstance(a, Forward) for a in self.left):
            first = next((i for i in able if not isinstance(self.left[i], BackwardWeight)), first)
        action = self.left.pop(first)
        self.begun.append(action)
        self.free_from = clock + (2 if isinstance(action, Backward) else 1)
        self.held += _change(action)
        return action

    def _able(self, clock: int, arrivals: Mapping[Message, int], chunks: int) -> Iterator[int]:
        """The indices of the actions that can run now. None overtakes another of its kind and chunk, or what it needs
        of its own microbatch. A forward must leave room for what it overtakes."""
        overtaken: set[OnChunk] = set()
        kinds: set[tuple[type[OnChunk], int]] = set()  # of what is overtaken, with the chunk
        held = most = self.held
        for index, action in enumerate(self.left):
            kind, needs = (type(action), action.chunk), (action.chunk, action.microbatch)
            message = needed(action, chunks)
            has_come = message is None or arrivals.get(message, inf) <= clock
            leaves_room = not isinstance(action, Forward) or most < self.limit
            in_order = kind not in kinds and overtaken.isdisjoint((Forward(*needs), BackwardInput(*needs)))
            if in_order and has_come and leaves_room:
                yield index
            overtaken.add(action)
            kinds.add(kind)
            if len(kinds) == _PERIOD:  # all that a stage has
                return
            held += _change(action)
            most = max(most, held)


def _change(action: OnChunk) -> int:
    """By how many chunks an action changes the activations that are held."""
    return 1 if isinstance(action, Forward) else -isinstance(action, Backward | BackwardWeight)
