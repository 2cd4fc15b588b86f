"""Where the processes of a script meet to make a process group, each time that they make one.

torch keeps the store of a process group as long as the group, under the same keys for each group. After an error, one
process may still find the store of the old group, and in it the addresses of connections that are closed. The store of
torchrun's agents even outlives the processes: what torchrun starts again finds the keys of those that were killed.

So one store lives as long as the script, and each time rank 0 calls a meeting under a name that nobody has used. A
rank counts itself among those who have come; in a meeting of before, all had come already::

    rank 0   calls 7f3a         3 have come: open 7f3a          keys 7f3a/...
    rank 1   finds 09c1: full   finds 7f3a: first to come       keys 7f3a/...
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from functools import lru_cache

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_CALLED = "lightning_parallel/meeting"  # key: the name of the newest meeting
_COME, _OPEN = "come", "open"  # keys of a meeting
_PAUSES = (0.001, 0.2)  # seconds between two looks: at first, and at most


def store_of_next_group(environment: ClusterEnvironment, timeout: timedelta) -> Store:
    """A store that nobody has written to before. All processes call it, for each group.

    Args:
        environment: where they meet, and which of them this is.
        timeout: of the store, and how long a rank waits for the others.

    Raises:
        TimeoutError: the others have not come.
    """
    store, others, deadline = script_store(environment, timeout), environment.world_size() - 1, _Deadline(timeout)
    if environment.global_rank() == 0:
        name = uuid.uuid4().hex
        meeting = PrefixStore(name, store)
        store.set(_CALLED, name)
        while meeting.add(_COME, 0) < others:
            deadline.wait(f"{meeting.add(_COME, 0)} of the {others} other ranks")
        meeting.set(_OPEN, "")
        return meeting
    seen = b""
    while True:
        called = store.get(_CALLED) if store.check([_CALLED]) else b""
        if called != seen:
            seen, meeting = called, PrefixStore(called.decode(), store)
            expected = meeting.add(_COME, 1) <= others
        if seen and expected and meeting.check([_OPEN]):
            return meeting
        deadline.wait("some ranks")


class _Deadline:
    """Pauses that get longer, until it is too late."""

    def __init__(self, timeout: timedelta) -> None:
        self._end = time.monotonic() + timeout.total_seconds()
        self._pause, self._longest = _PAUSES

    def wait(self, who: str) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"Only {who} have come to make a process group. The cause is in the output of the rest.")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest)


def script_store(environment: ClusterEnvironment, timeout: timedelta) -> Store:
    """The store of all processes, which lives as long as this one; that of torchrun's agents lives as long as they.

    Args:
        environment: where the processes meet, and which of them this is.
        timeout: of the store.
    """
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # torch's rendezvous reads them
    return _store(address, port, environment.global_rank(), environment.world_size(), timeout)


def end() -> None:
    """Give up the store, before the interpreter is finalized."""
    _store.cache_clear()


@lru_cache(maxsize=1)
def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The arguments say which store it is."""
    store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    return store
