"""What all stages in a V do for one microbatch, and when: a *block* (arXiv:2405.15362).

It is repeated every six clocks, which is what the three actions of two chunks take, so where a microbatch follows
another no stage waits. Before the turn a microbatch takes one clock from a stage to the next, and after it ``hop``
clocks. A gradient takes one clock on its way back to the turn, and ``hop`` clocks from there on. Here is a block of 3
stages with a hop of 1; ``a`` is a stage's first chunk, ``I`` and ``W`` the halves of a backward::

    stage 0 |   .   . F0a F0b   .   .   .   .   .   . I0b I0a W0a W0b   .
    stage 1 |   . F0a   .   . F0b   .   .   .   . I0b   . W0b I0a   . W0a
    stage 2 | F0a   .   .   .   . F0b   .   . I0b   . W0b   .   . B0a ===

The longer the hops, the longer activations are held, and the less stages wait where no microbatch follows.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations, product
from typing import NamedTuple

from lightning_parallel.schedules.actions import Backward, BackwardInput, BackwardWeight, Forward, OnChunk
from lightning_parallel.schedules.generators import refuse_below

PERIOD = 6  # clocks from a block to the next: three actions of two chunks
HOP_OF_V_MIN, HOP_OF_V_HALF = 1, 2


class Block(NamedTuple):
    """The clocks at which the chunks run for microbatch 0, by chunk."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]  # first halves
    weight: tuple[int, ...]  # second halves; the first chunk's backward is whole

    @property
    def stages(self) -> int:
        return len(self.forward) // 2

    def held(self) -> int:
        """The most chunks whose activations a stage holds."""
        most = 0
        for stage in range(self.stages):
            own = chunks_in_v(self.stages, stage)
            for clock in (self.forward[j] for j in own):
                begun = sum((clock - self.forward[j]) // PERIOD for j in own)
                most = max(most, begun - sum((clock - self.weight[j]) // PERIOD for j in own))
        return most

    def has_room(self) -> bool:
        """Is the second clock of the first chunk's backward, which is whole, free on its stage? Otherwise what comes
        there begins a clock late in each block. Then two stages wait for each other's messages in each, with no clock
        between them."""
        last = len(self.forward) - 1
        others = self.forward[0], self.forward[last], self.backward[last], self.weight[last]
        return (self.backward[0] + 1) % PERIOD not in {clock % PERIOD for clock in others}

    def clock(self, action: OnChunk) -> int:
        """The clock at which an action comes, where no stage ever waits."""
        kinds = {Forward: self.forward, BackwardWeight: self.weight}
        return kinds.get(type(action), self.backward)[action.chunk] + PERIOD * action.microbatch

    def actions(self, stage: int, microbatches: range) -> list[OnChunk]:
        """A stage's actions for some microbatches, in the order of their clocks."""
        found: list[OnChunk] = []
        for k, j in product(microbatches, chunks_in_v(self.stages, stage)):
            # Nobody waits for the first half of the first chunk's.
            found += [Forward(j, k), *([Backward(j, k)] if j == 0 else [BackwardInput(j, k), BackwardWeight(j, k)])]
        return sorted(found, key=self.clock)


def chunks_in_v(stages: int, stage: int) -> tuple[int, int]:
    """A stage's chunks, before the turn and after it."""
    return stages - 1 - stage, stages + stage


@cache
def blocks(stages: int, hop: int) -> tuple[Block, ...]:
    """The blocks with a hop, those with the shortest waits first. Clocks form a block if no stage has two actions at
    once. Where hops alone would bring that about, a microbatch waits at a turn."""
    waits = sorted(product(range(PERIOD), repeat=3), key=sum)
    return tuple(block for wait in waits if (block := _block(stages, hop, *wait)))


def _block(stages: int, hop: int, wait_at_turn: int, wait_at_loss: int, wait_at_last_turn: int) -> Block | None:
    """The block with a hop and these waits; None if a stage would have two actions at once."""
    chunks = 2 * stages
    forward, backward, weight = ([0] * chunks for _ in range(3))
    for j in range(1, chunks):
        forward[j] = forward[j - 1] + (1 if j < stages else 1 + wait_at_turn if j == stages else hop)
    backward[-1] = forward[-1] + 1 + wait_at_loss
    for j in reversed(range(chunks - 1)):
        backward[j] = backward[j + 1] + (1 if j >= stages else 1 + wait_at_last_turn if j == stages - 1 else hop)
    for stage in range(stages):
        own = chunks_in_v(stages, stage)
        taken = {clock % PERIOD for j in own for clock in (forward[j], backward[j])}
        if len(taken) < 4:
            return None
        # Second halves take the clocks that are left, as early as they can.
        free = permutations(set(range(PERIOD)) - taken)
        after = [
            [backward[j] + 1 + (at - backward[j] - 1) % PERIOD for j, at in zip(own, each, strict=True)]
            for each in free
        ]
        for j, clock in zip(own, min(after, key=sum), strict=True):
            weight[j] = clock
    weight[0] = backward[0]
    return Block(tuple(forward), tuple(backward), tuple(weight))


@cache
def smallest(stages: int, hop: int) -> Block:
    """The block with a hop that holds the activations of the fewest chunks on a stage; of several, the one with the
    shortest waits. It has room for a whole backward. Lists that begin and end with a batch try the other blocks, too:
    there V-Min over 8 stages waits less with one that has none."""
    refuse_below(1, stages=stages)
    return min(filter(Block.has_room, blocks(stages, hop)), key=Block.held)
