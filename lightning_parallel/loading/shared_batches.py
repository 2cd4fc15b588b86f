"""One rank of a replica reads the data loaders, and sends each batch to the others: ``share_batches=True``.

By default each rank reads all loaders. So each decodes every image, and loaders have to draw the same samples on all
ranks. Where they don't, because they draw by themselves, or where decoding is what steps wait for, one rank reads::

    first rank     batch 0 read, sent | step             batch 1 read, sent | step
    other ranks    batch 0 received   | step             batch 1 received   | step

With a batch come the states of the generators that the loader has drawn from. So code between the steps draws the same
numbers on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_parallel.ranks.collectives import broadcast_object, decided_by_first
from lightning_parallel.ranks.run import Run
from lightning_parallel.seeding import moved, random_state, restore_random_state, states_of

T = TypeVar("T")


class SharedLoader:
    """Stands for a loader on the ranks of a replica. Whatever else is asked of it, the rank's own loader answers."""

    def __init__(self, loader: Any, run: Run) -> None:
        self.loader, self._replica, self._collectives = loader, run.groups.model, run.collectives

    def __iter__(self) -> Iterator[Any]:
        return self._read() if self._replica.rank() == 0 else self._received()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no attributes yet asks for it
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _read(self) -> Iterator[Any]:
        before, iterator = random_state(), None
        while True:
            with self._collectives.inside_step("a loader"):  # it may divide the samples over the ranks that it sees
                iterator = iter(self.loader) if iterator is None else iterator
                try:
                    batch = [next(iterator)]
                except StopIteration:
                    batch = []
            after = random_state()
            broadcast_object((batch, states_of(after, moved(before, after))), None, self._replica)
            if not batch:
                return
            yield batch[0]
            before = random_state()

    def _received(self) -> Iterator[Any]:
        while True:
            message: Any = broadcast_object(None, None, self._replica)
            batch, drawn = message
            restore_random_state(drawn)
            if not batch:
                return
            yield batch[0]


def read_by_one(read: Callable[[], T], replica: dist.ProcessGroup) -> T:
    """What ``read`` returns on the first rank of a replica, on all of its ranks. The others don't call it.

    Raises:
        ValueError: it can't be sent. What ``read`` raises is raised on all ranks.
    """

    def packed() -> bytes:
        batch = read()
        try:
            return pickle.dumps(batch)
        except Exception as error:  # any: an object may refuse it as it likes
            raise ValueError(
                f"share_batches=True: the first batch can't be sent, since it can't be pickled "
                f"({type(error).__name__}: {error}). Have the loader give tensors, numbers and texts, or leave the "
                f"setting out."
            ) from error

    found: T = pickle.loads(decided_by_first(replica, packed))
    return found
