"""Lists of a V as they run clock by clock, where a stage that would wait takes a later action that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from lightning_parallel.schedules.actions import (
    Backward,
    BackwardWeight,
    Forward,
    Message,
    OnChunk,
    needed,
    sent,
)


def run(stages: Sequence[StageAtWork], arrivals: dict[Message, int], is_done: Callable[[], bool]) -> int:
    """Let stages run what is left in their lists, until something is done. Returns the clock after that.

    Args:
        arrivals: the clocks from which messages are there; added to.
    """
    clock = 0
    while not is_done():
        begun = [stage.begin(clock, arrivals, 2 * len(stages)) for stage in stages if stage.free_from <= clock]
        ahead = max([*arrivals.values(), *(stage.free_from for stage in stages)]) if not any(begun) else clock + 1
        assert ahead > clock, "all stages wait"
        clock += 1
    return clock


@dataclass
class StageAtWork:
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

    def __post_init__(self) -> None:
        self._kinds = len({*map(_kind, self.left)})

    def begin(self, clock: int, arrivals: dict[Message, int], chunks: int) -> OnChunk | None:
        """Begin the first action that can run, and note when its message is there; None if there is none. After the
        last forward, first halves come before second ones: other stages wait for them."""
        able = self._able(clock, arrivals, chunks)
        if (first := next(able, None)) is None:
            return None
        if isinstance(self.left[first], BackwardWeight) and not any(isinstance(a, Forward) for a in self.left):
            first = next((i for i in able if not isinstance(self.left[i], BackwardWeight)), first)
        action = self.left.pop(first)
        self.begun.append(action)
        self.free_from = clock + (2 if isinstance(action, Backward) else 1)
        self.held += _change(action)
        if (message := sent(action, chunks)) is not None:
            arrivals[message] = self.free_from
        return action

    def _able(self, clock: int, arrivals: Mapping[Message, int], chunks: int) -> Iterator[int]:
        """The indices of the actions that can run now. None overtakes another of its kind and chunk, or what it needs
        of its own microbatch. A forward must leave room for what it overtakes."""
        places: set[tuple[int, int]] = set()  # chunks and microbatches of overtaken forwards and first halves
        kinds: set[tuple[type[OnChunk], int]] = set()
        held = most = self.held
        for index, action in enumerate(self.left):
            kind, place, change = _kind(action), (action.chunk, action.microbatch), _change(action)
            has_room = most < self.limit or not isinstance(action, Forward)
            if kind not in kinds and place not in places and has_room:
                message = needed(action, chunks)
                if message is None or arrivals.get(message, inf) <= clock:
                    yield index
            if change >= 0:
                places.add(place)
            kinds.add(kind)
            if len(kinds) == self._kinds:  # all that the stage has
                return
            held += change
            most = max(most, held)


def _kind(action: OnChunk) -> tuple[type[OnChunk], int]:
    return type(action), action.chunk


def _change(action: OnChunk) -> int:
    """By how many chunks an action changes the activations that are held."""
    return 1 if isinstance(action, Forward) else -isinstance(action, Backward | BackwardWeight)
