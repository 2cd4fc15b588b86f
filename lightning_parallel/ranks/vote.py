"""What ranks want between two batches holds on all of them from the same batch on, though some are ahead of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch.distributed as dist

from lightning_parallel.ranks.collectives import PeerLostError, guarded
from lightning_parallel.ranks.notice import store_of_run

_BITS = 15  # of the number of ranks that have ended a batch, and of those with each wish: four numbers in one
_LEFT = "left"  # in the place of a count that won't come


class Vote:
    """The ranks' wishes, such as ``trainer.should_stop``, counted for each batch in the store where they have met.

    What all ranks want after the same batch, as code does that runs on all of them, holds after that very batch, as in
    one process. What some want holds as many batches later as a rank may be ahead, and one more::

        rank 0    batch 0   | batch 1               | batch 2, ends
        rank 1              | batch 0, wants to end | batch 1       | batch 2, ends

    A rank doesn't get further ahead, since it waits for that count. So it is complete before it is needed, if ``ahead``
    is what the schedule allows.

    All ranks make it.

    Args:
        wishes: the number of things that a rank may wish, at most three.
        ahead: how many batches a rank may be ahead of another one.
    """

    def __init__(self, wishes: int, ahead: int) -> None:
        self._wished = self._holds = [False] * wishes
        self._ahead, self._ranks, self._store = ahead, dist.get_world_size(), store_of_run("vote")
        self._batches = self._met_at = 0

    def after_batch(self, *wishes: bool) -> list[bool]:
        """Which wishes hold now. All ranks call it after each batch. One that wishes something for the first time waits
        until all have ended the batch."""
        new = [wish and not before for wish, before in zip(wishes, self._wished, strict=True)]
        self._wished = [any(each) for each in zip(new, self._wished, strict=True)]
        batch, self._batches = self._batches, self._batches + 1
        mine = sum(wish << _BITS * i for i, wish in enumerate((True, *new)))
        sum_of_ranks = guarded(self._store.add, f"batch {batch}", mine)
        if sum_of_ranks % (1 << _BITS) == self._ranks:
            guarded(self._store.set, f"count {batch}", str(sum_of_ranks))
            self._forget(batch - self._ahead - 2)  # all have ended this one, so nobody needs the count of that one
        if any(new):
            self._hold(self._count(batch), self._ranks)
        if batch - self._ahead > self._met_at:
            self._hold(self._count(batch - self._ahead - 1), 1)
        return self._holds

    @property
    def held(self) -> list[bool]:
        """Which wishes hold on all ranks."""
        return self._holds

    @property
    def pending(self) -> list[bool]:
        """Which wishes of this rank don't hold yet."""
        return [wish and not held for wish, held in zip(self._wished, self._holds, strict=True)]

    def met(self) -> None:
        """Begin anew where all ranks have ended the same batches and have told each other what they wish: code of the
        user's may take it back from there on. All ranks call it."""
        self._wished = self._holds = [False] * len(self._holds)
        self._met_at = self._batches

    def leave(self) -> None:
        """Let the others know that this rank has failed: they would wait for it until the timeout."""
        last = self._batches + self._ahead + 1  # that another one may have ended
        with suppress(RuntimeError):  # the store may be gone, too
            for batch in range(self._batches, last + 1):
                self._store.set(f"count {batch}", _LEFT)

    def _count(self, batch: int) -> Iterator[int]:
        """How many ranks have wished each thing for the first time after a batch, when all have ended it."""
        count = guarded(self._store.get, f"count {batch}").decode()
        if count == _LEFT:
            raise PeerLostError(f"Not all ranks came to the end of batch {batch}. The cause is in the others' output.")
        sum_of_ranks = int(count)
        return (sum_of_ranks >> _BITS * (1 + i) & (1 << _BITS) - 1 for i in range(len(self._wished)))

    def _hold(self, counts: Iterator[int], enough: int) -> None:
        self._holds = [held or count >= enough for held, count in zip(self._holds, counts, strict=True)]

    def _forget(self, batch: int) -> None:
        if batch >= 0:
            for name in (f"batch {batch}", f"count {batch}"):
                guarded(self._store.delete_key, name)
