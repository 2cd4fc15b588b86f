"""V-Half and V-Min that are never flushed: two chunks a stage in a V, backwards in halves, an update for each chunk."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Message,
    OnChunk,
    StepOfChunk,
    needed,
)
from lightning_parallel.schedules.blocks import HOP_OF_V_HALF, HOP_OF_V_MIN, chunks_in_v, smallest
from lightning_parallel.schedules.filling import StageAtWork, run

VShape: TypeAlias = Literal["vhalf", "vmin"]
_HOPS: dict[VShape, int] = {"vhalf": HOP_OF_V_HALF, "vmin": HOP_OF_V_MIN}


class AsyncV:
    """The endless list of one stage in a V, produced slice by slice.

    A batch's forwards all run in its own slice, on every stage, the last chunk's too. So the loss of a batch is there
    when its slice has run, though the last stage begins a microbatch long before it ends its forward. The price: before
    the last stage begins the next batch, the way down to the turn and back runs empty of forwards. Backwards of
    microbatches in flight, and their second halves, fill that time, with many microbatches a batch nearly all of it
    (``steady.py``). Nothing else ever waits for an update, and nothing is flushed.

    2 stages, V-Half, 2 updates of 2 microbatches, drain included; ``a`` is a stage's first chunk, ``I`` and ``W`` the
    halves of a backward:

      stage 0 |   . F0a F0b F1a F1b I0b I0a W0a F2a W0b F2b I1b I1a W1a F3a W1b|F3b I2b I2a W2a W2b   . I3b I3a W3a W3b|
      stage 1 | F0a F1a   . F0b I0b W0b F1b F2a B0a === I1b W1b|F2b F3a B1a ===|I2b W2b F3b B2a === I3b W3b|  . B3a ===|

    Each chunk has updates of its own, as soon as its gradients of an update are complete; of a stage's two chunks the
    later one makes an update first, so a parameter of both can be updated with the first one's.

    Args:
        stage: the index of the stage whose list it is.
        shape: which block is repeated, and with it the limit of activations.
    """

    def __init__(self, stages: int, stage: int, shape: VShape) -> None:
        self._stage, self._hop = stage, _HOPS[shape]
        self._chunks = chunks_in_v(stages, stage)
        self._state = self._empty = _State((((),) * stages), ((0,) * stages), ((0,) * stages), ())
        self._microbatch = 0  # the number of the next one
        self._ending: set[int] = set()  # microbatches that end an update which hasn't been made
        self._steps: Counter[int] = Counter()  # by chunk
        self._waiting: deque[OnChunk] = deque()  # backwards of the first chunk
        self._due: int | None = None  # the microbatch that ends the update which the first chunk is to make

    def feed(self, count: int, *, ends_update: bool = True) -> Iterator[Action]:
        """As :meth:`.AsyncOneFOneB.feed`, with the forwards of all of the microbatches."""
        if ends_update:
            self._ending.add(self._microbatch + count - 1)
        begun, self._state = _fed(self._hop, self._state, count)
        actions = self._numbered(begun[self._stage], self._microbatch)
        self._microbatch += count
        return iter([*self._with_steps(actions)])

    def drain(self) -> Iterator[Action]:
        """As :meth:`.AsyncOneFOneB.drain`."""
        (begun, _), self._state = _fed(self._hop, self._state, 0), self._empty
        return iter([*self._with_steps(self._numbered(begun[self._stage], self._microbatch))])

    @staticmethod
    def _numbered(actions: Iterable[OnChunk], first: int) -> Iterator[OnChunk]:
        return (replace(action, microbatch=first + action.microbatch) for action in actions)

    def _with_steps(self, actions: Iterable[OnChunk]) -> Iterator[Action]:
        """Actions, with the steps that fall due after them."""
        first, later = self._chunks
        for action in actions:
            if action.chunk == first and isinstance(action, Backward | BackwardWeight):
                self._waiting.append(action)
            else:
                yield action
                if isinstance(action, BackwardWeight) and action.microbatch in self._ending:
                    yield self._step(later)
            yield from self._of_first_chunk()

    def _of_first_chunk(self) -> Iterator[Action]:
        """What completes gradients of the first chunk, and its steps. Where an update waits for the later chunk's, so
        does what would add to the next one; no stage waits for it."""
        first, later = self._chunks
        while self._waiting or self._due is not None:
            if self._due is None:
                action = self._waiting.popleft()
                yield action
                self._due = action.microbatch if action.microbatch in self._ending else None
            elif self._steps[first] < self._steps[later]:
                self._ending.remove(self._due)
                self._due = None
                yield self._step(first)
            else:
                return

    def _step(self, chunk: int) -> StepOfChunk:
        self._steps[chunk] += 1
        return StepOfChunk(self._stage, self._steps[chunk] - 1, chunk)


# -- all stages together -----------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """Between two slices: what stages have been fed and haven't begun, the clocks at which they are free, the chunks
    whose activations they hold, and the clocks at which messages to what is left are there. Microbatches and clocks
    are counted from the next one."""

    left: tuple[tuple[OnChunk, ...], ...]
    free_from: tuple[int, ...]
    held: tuple[int, ...]
    arrivals: tuple[tuple[Message, int], ...]


_Begun: TypeAlias = tuple[tuple[OnChunk, ...], ...]  # by stage


@lru_cache(maxsize=256)
def _fed(hop: int, state: _State, count: int) -> tuple[_Begun, _State]:
    """What stages begin when microbatches are fed, until the last stage has begun the last of the forwards, and the
    state then. Nobody begins what is fed next before that, so it needn't be known. Batches of one size come to the same
    states again. When none is fed, what they begin until nothing is left."""
    block = smallest(len(state.left), hop)
    limit = block.held()
    stages = [
        StageAtWork(
            sorted((*left, *block.actions(s, range(count))), key=block.clock), limit, free_from=free_from, held=held
        )
        for s, (left, free_from, held) in enumerate(zip(state.left, state.free_from, state.held, strict=True))
    ]

    def is_done() -> bool:
        if not count:
            return not any(stage.left for stage in stages)
        return not any(isinstance(action, Forward) for action in stages[-1].left)

    arrivals = dict(state.arrivals)
    clock = run(stages, arrivals, is_done)
    awaited = (needed(action, 2 * len(stages)) for stage in stages for action in stage.left)
    return tuple(tuple(stage.begun) for stage in stages), _State(
        tuple(tuple(replace(a, microbatch=a.microbatch - count) for a in stage.left) for stage in stages),
        tuple(max(0, stage.free_from - clock) for stage in stages),
        tuple(stage.held for stage in stages),
        tuple(
            (message._replace(microbatch=message.microbatch - count), max(0, arrivals[message] - clock))
            for message in awaited
            if message in arrivals
        ),
    )
