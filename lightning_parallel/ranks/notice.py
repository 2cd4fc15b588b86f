"""What ranks tell each other without waiting, through the store where the processes have met."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_parallel.private.torch.groups import default_store
from lightning_parallel.ranks.collectives import guarded


def store_of_run(purpose: str) -> PrefixStore:
    """A part of the store that earlier runs haven't written to. All ranks ask for it equally often."""
    store = default_store()
    run = store.add(f"lightning_parallel/{purpose}_of/{dist.get_rank()}", 1)
    return PrefixStore(f"lightning_parallel/{purpose}/{run}", store)


class Notice:
    """The first rank with a reason to stop names a batch that nobody has reached, on a notice that all read.

    All ranks make it, and read it at the same batches: at each one, or at each tenth.

    Args:
        ahead: how many batches a rank may be ahead of another one.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._store = store_of_run("notice")
        self._read: tuple[int, int] | None = None

    def at(self, batch: int, mine: int) -> int:
        """The reason that ends the run before this batch; 0 for none.

        Args:
            batch: its number in the run.
            mine: this rank's reason, a positive number; 0 for none.
        """
        if self._read is None and mine:
            guarded(self._store.compare_set, "stop", "", f"{mine} {batch + self._ahead + 2}")
        if self._read is None and guarded(self._store.check, ["stop"]):
            number, stop = map(int, guarded(self._store.get, "stop").split())
            self._read = number, stop
        number, stop = self._read or (0, 0)
        return number if batch >= stop else 0


class Noticeboard:
    """A board where each rank leaves a figure, and rank 0 reads those of all. Ranks may be at different batches: the
    figures may be a log interval old. All ranks make it."""

    def __init__(self) -> None:
        self._store = store_of_run("figures")

    def leave(self, figure: int) -> None:
        """Leave this rank's figure, in the place of an earlier one."""
        guarded(self._store.set, str(dist.get_rank()), str(figure))

    def read(self) -> list[int]:
        """The figures of all ranks, in their order; empty as long as a rank hasn't left any."""
        keys = [str(rank) for rank in range(dist.get_world_size())]
        return [*map(int, guarded(self._store.multi_get, keys))] if guarded(self._store.check, keys) else []
