"""Schedules of two chunks a stage in a V, for any limit of activations: ZB-V, V-Half, V-Min, and what lies between.

The chunks before the turn lie on the stages from the last to the first, those after it on the way back. So the stage
with the loss has the input too. Backwards come in two halves, and second halves, for which nobody waits, fill gaps
(zero bubble: arXiv:2401.10241).

Each repeats a block (``blocks.py``), so in the middle of a batch no stage waits. Of what the first stage of 1F1B holds,
every stage of many holds about, by the block's hop::

    hop 1, V-Min     1/3      hop 3            2/3
    hop 2, V-Half    1/2      hop 5, ZB-V      all

A stage's list has the actions of all blocks of a batch, in the order of their clocks. Then the gaps at its ends are
filled: where the stage would wait, it takes the next action that can run and keeps within the limit (``filling.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from math import ceil

from lightning_parallel.schedules.actions import Message, Schedule, Step
from lightning_parallel.schedules.blocks import HOP_OF_V_HALF, HOP_OF_V_MIN, Block, blocks, smallest
from lightning_parallel.schedules.filling import StageAtWork, run
from lightning_parallel.schedules.generators import refuse_below
from lightning_parallel.schedules.simulate import simulate

_HOPS = (5, 3, HOP_OF_V_HALF, HOP_OF_V_MIN)  # with 4, a stage of four or more would have two actions at once
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
    limit, fewest = int(activation_memory * 2 * stages + 1e-9), smallest(stages, HOP_OF_V_MIN).held()
    if limit < fewest and stages > 1:
        raise ValueError(
            f"activation_memory={activation_memory:g}: with {stages} stages give at least "
            f"{ceil(1000 * fewest / (2 * stages)) / 1000:g}, which V-Min holds, or more stages."
        )
    return _within(stages, microbatches, max(limit, fewest))


def vhalf(stages: int, microbatches: int) -> Schedule:
    """V-Half (arXiv:2405.15362): stages // 2 + 1 microbatches' activations where `zbv` holds as many as there are
    stages, and a bubble between its and `one_f_one_b`'s.

    With 8 stages and 16 microbatches, stages compute 85 % of the time, for 93 % and 70 %.
    """
    return _within(stages, microbatches, smallest(stages, HOP_OF_V_HALF).held())


def vmin(stages: int, microbatches: int) -> Schedule:
    """V-Min (arXiv:2405.15362): ceil((stages + 2) / 3) microbatches' activations where `zbv` holds as many as there are
    stages. Where forward, first and second half take equal times, the bubble is smaller than `one_f_one_b`'s; else it
    may be larger.

    With 8 stages and 16 microbatches, stages compute 81 % of the time, for 93 % and 70 %.
    """
    return _within(stages, microbatches, smallest(stages, HOP_OF_V_MIN).held())


def zbv_in_bytes(stages: int, microbatches: int, limit: int, nbytes: Callable[[Schedule], int]) -> Schedule:
    """The lists of :func:`zbv` with the largest part of its activations that is within ``limit`` bytes on all stages;
    V-Min's if these hold more, too.

    Args:
        nbytes: the bytes that the fullest stage holds with some lists.
    """
    chunks = range(smallest(stages, HOP_OF_V_MIN).held(), 2 * stages + 1)
    found = bisect_right(chunks, limit, key=lambda most: nbytes(_within(stages, microbatches, most)))
    return _within(stages, microbatches, chunks[max(found - 1, 0)])


def _within(stages: int, microbatches: int, limit: int) -> Schedule:
    """The lists that end first, of some blocks that hold the activations of at most ``limit`` chunks on a stage. There
    is one that does."""
    refuse_below(1, microbatches=microbatches)
    return _lists(_chosen(stages, min(microbatches, 2 * stages), limit), microbatches, limit)


@cache
def _chosen(stages: int, microbatches: int, limit: int) -> Block:
    """The block whose lists end first; of several, the one with the longest hops."""
    blocks = [block for hop in _HOPS for block in _fitting(stages, hop, limit)]
    if stages > _COMPARED_TO:
        return blocks[0]
    return min(blocks, key=lambda block: simulate(_lists(block, microbatches, limit)).makespan)


def _fitting(stages: int, hop: int, limit: int) -> Iterator[Block]:
    """Some blocks with a hop that hold no more than a limit."""
    return islice((block for block in blocks(stages, hop) if block.held() <= limit), _TRIED)


def _lists(block: Block, microbatches: int, limit: int) -> Schedule:
    """The lists of a batch, by the blocks of its microbatches."""
    stages = [StageAtWork(block.actions(s, range(microbatches)), limit) for s in range(block.stages)]
    arrivals: dict[Message, int] = {}
    run(stages, arrivals, lambda: not any(stage.left for stage in stages))
    return [[*stage.begun, Step(s, 0)] for s, stage in enumerate(stages)]
