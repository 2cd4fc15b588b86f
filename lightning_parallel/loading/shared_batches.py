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
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.ranks.collectives import broadcast_object, decided_by_first
from lightning_parallel.ranks.run import Run
from lightning_parallel.seeding import moved, random_state, restore_random_state, states_of

T = TypeVar("T")


class _Message(NamedTuple):
    batch: Any
    is_end: bool  # there is no batch any more
    drawn: dict[str, Tensor]  # the states of the generators that the loader has drawn from since the last message


class SharedLoader:
    """Stands for a loader on the ranks of a replica. Whatever else is asked of it, the rank's own loader answers."""

    def __init__(self, loader: Any, run: Run) -> None:
        self.loader, self._replica, self._collectives = loader, run.groups.model, run.collectives

    def __iter__(self) -> Iterator[Any]:
        batches = self._read() if self._replica.rank() == 0 else self._received()
        for message in batches:
            if message.is_end:
                return
            yield message.batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no attributes yet asks for it
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _read(self) -> Iterator[_Message]:
        before, iterator = random_state(), None
        while True:
            batch, is_end = None, False
            with self._collectives.inside_step("a loader"):  # it may divide the samples over the ranks that it sees
                iterator = iter(self.loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    is_end = True
            after = random_state()
            message = _Message(batch, is_end, states_of(after, moved(before, after)))
            broadcast_object(message, None, self._replica)
            yield message
            before = random_state()

    def _received(self) -> Iterator[_Message]:
        while True:
            message: Any = broadcast_object(None, None, self._replica)
            restore_random_state(message.drawn)
            yield message


def read_by_one(read: Callable[[], T], replica: dist.ProcessGroup) -> T:
    """What ``read`` returns on the first rank of a replica, on all of its ranks. The others don't call it.

    Raises:
        ValueError: it can't be sent. What ``read`` raises is raised on all ranks.
    """
    own: T | None = None

    def packed() -> bytes:
        nonlocal own
        own = read()
        try:
            return pickle.dumps(own)
        except Exception as error:  # any: an object may refuse it as it likes
            raise ValueError(
                f"share_batches=True: the first batch can't be sent, since it can't be pickled "
                f"({type(error).__name__}: {error}). Have the loader give tensors, numbers and texts, or leave the "
                f"setting out."
            ) from error

    data = decided_by_first(replica, packed)
    return own if replica.rank() == 0 else pickle.loads(data)  # type: ignore[return-value]
