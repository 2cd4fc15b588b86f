"""Places a traced step's calls on chunks. From this follows where each chunk leaves the step, and which chunks run the
code at a place."""

from __future__ import annotations

from math import inf

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.tracing.trace import Place, Trace


class PlacedStep:
    """A traced step, each call of which is placed on a chunk: the planned one, or a later one that has the unit, if the
    call needs what is computed there.

    Attributes:
        chunks: the chunk of each call.
        late: the indices of calls that need what a later chunk computes, and of what their chunks call after them. The
            chunk has left the step by then.
        last_calls: for each chunk the index of its last call; None if it has none. But if earlier chunks make all calls
            of the step, as in an evaluation without the last layers, it is the step's last call.
        ends: where each chunk leaves the step: the index of its last call, inf for the last chunk.
    """

    def __init__(self, seen: Trace, partition: Partition) -> None:
        self.seen, self.partition = seen, partition
        self.chunks: list[int] = []
        self.late: set[int] = set()
        has_left: set[int] = set()
        for i, (call, sources) in enumerate(zip(seen.calls, seen.sources(), strict=True)):
            needed = max((self.chunks[j] for j in sources if j < i), default=0)
            chunk = partition.chunk_of(call.key, needed)
            self.chunks.append(chunk)
            if chunk in has_left or needed > chunk:
                has_left.add(chunk)
                self.late.add(i)
        last = {chunk: i for i, chunk in enumerate(self.chunks) if i not in self.late}
        latest, of_step = max(last, default=partition.chunks), max(last.values(), default=None)
        self.last_calls = [of_step if chunk > latest else last.get(chunk) for chunk in range(partition.chunks)]
        self.ends = [self._end_of(chunk) for chunk in range(partition.chunks)]

    def _end_of(self, chunk: int) -> float:
        """A chunk without calls leaves in front of (-0.5) the first call of a later one."""
        if chunk == self.partition.chunks - 1:
            return inf
        own = self.last_calls[chunk]
        first_later = (i - 0.5 for i, each in enumerate(self.chunks) if each > chunk)
        return next(first_later, inf) if own is None else own

    def calling(self, unit: str) -> set[int]:
        """The chunks that call a unit."""
        return {chunk for call, chunk in zip(self.seen.calls, self.chunks, strict=True) if call.unit == unit}

    def running(self, place: Place) -> list[int]:
        """The chunks that run the code at a place."""
        if place.during == "call" and place.index < len(self.chunks):
            return [self.chunks[place.index]]
        at = place.index - (0 if place.during == "hooks" else 0.5)
        return [chunk for chunk, end in enumerate(self.ends) if at <= end]
