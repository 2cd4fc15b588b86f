"""How ranks agree on the batch before which they stop, where some are ahead of others and none waits."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_parallel.private.torch import default_store
from lightning_parallel.ranks.collectives import guarded


class Notice:
    """The first rank with a reason to stop names a batch that nobody has reached, on a notice that all read.

    All ranks make it, and read it at the same batches: at each one, or at each tenth.

    Args:
        ahead: how many batches a rank may be ahead of another one.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        store = default_store()
        run = store.add(f"lightning_parallel/notices_of/{dist.get_rank()}", 1)
        self._store = PrefixStore(f"lightning_parallel/notice/{run}", store)
        self._read: tuple[int, int] | None = None

    def at(self, batch: int, mine: int) -> int:
        """The reason that ends the run before this batch; 0 for none.

        Args:
            batch: its number in the run.
            mine: this rank's reason, a positive number; 0 for none.
        """
        if self._read is None and mine:
            guarded(self._store.compare_set, "stop", "", f"{mine} {batch + self._ahead + 1}")
        if self._read is None and guarded(self._store.check, ["stop"]):
            number, stop = map(int, guarded(self._store.get, "stop").split())
            self._read = number, stop
        number, stop = self._read or (0, 0)
        return number if batch >= stop else 0
