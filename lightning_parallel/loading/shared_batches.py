"""One rank of a replica reads the data loaders, and sends each batch to the others: ``share_batches=True``.

By default each rank reads all loaders. So each decodes every image, and loaders have to draw the same samples on all
ranks. Where they don't, because their random generators are their own, or where decoding is what steps wait for, one
rank reads::

    first rank     batch 0 read, sent | step             batch 1 read, sent | step
    other ranks    batch 0 received   | step             batch 1 received   | step

With a batch, and when an iterator is made, come the states of the generators that the loader has drawn from. So code
between the steps draws the same numbers on all ranks. Loaders are still made on every rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lightning.fabric.utilities.data import sized_len

from lightning_parallel.batch import cloned
from lightning_parallel.ranks.collectives import broadcast_object, decided_by_first
from lightning_parallel.ranks.run import Run
from lightning_parallel.seeding import moved, random_state, restore_random_state, states_of

T = TypeVar("T")


class SharedLoader:
    """Stands for a loader on the ranks of a replica, which all make it and iterate it together. Whatever else is asked
    of it, the rank's own loader answers."""

    def __init__(self, loader: Any, run: Run) -> None:
        self.loader, self._replica, self._collectives = loader, run.groups.model, run.collectives
        self._length = broadcast_object(sized_len(loader), None, self._replica)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the {type(self.loader).__name__} of the first rank has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no attributes yet asks for it
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        iterators: list[Iterator[Any]] = []  # of the first rank
        # Not at the first batch: of several loaders all iterators are made first, and each may draw a seed.
        self._shared(lambda: iterators.append(iter(self.loader)))
        return self._batches(iterators)

    def _batches(self, iterators: Sequence[Iterator[Any]]) -> Iterator[Any]:
        def read() -> list[Any]:
            try:
                return [cloned(next(iterators[0]))]  # a view would be sent with all of its memory
            except StopIteration:
                return []

        while batch := self._shared(read):
            yield batch[0]

    def _shared(self, read: Callable[[], T]) -> T:
        """What ``read`` returns on the first rank. The others don't call it, but have their generators drawn as far."""
        found: Any = None
        if self._replica.rank() == 0:
            before = random_state()
            with self._collectives.inside_step("a loader"):  # it may divide the samples over the ranks that it sees
                value = read()
            after = random_state()
            found = value, states_of(after, moved(before, after))
        value, drawn = broadcast_object(found, None, self._replica)
        restore_random_state(drawn)
        return value


def read_by_one(read: Callable[[], T], run: Run) -> T:
    """What ``read`` returns on the first rank of a replica, on all of its ranks. The others don't call it.

    Raises:
        ValueError: it can't be sent. What ``read`` raises is raised on all ranks.
    """

    def packed() -> bytes:
        with run.collectives.inside_step("a loader"):
            batch = read()
        try:
            return pickle.dumps(batch)
        except Exception as error:  # any: an object may refuse it as it likes
            raise ValueError(
                f"share_batches=True: the first batch can't be sent, since it can't be pickled "
                f"({type(error).__name__}: {error}). Have the loader give tensors, numbers and texts, or leave the "
                f"setting out."
            ) from error

    found: T = pickle.loads(decided_by_first(run.groups.model, packed))
    return found
