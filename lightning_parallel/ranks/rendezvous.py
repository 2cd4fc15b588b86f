"""Gives the processes of a script a place to meet, each time that they make a process group.

torch keeps the store of a process group as long as the group, under the same keys for each group. After an error, one
process may still find the store of the old group, and in it the addresses of connections that are closed. The store of
torchrun's agents even outlives the processes: what torchrun starts again finds the keys of those that were killed.

So one store lives as long as the script, and each group has keys under a name that nobody has used. A rank asks under a
new token, and rank 0 answers each token with the name, until every rank has said there that it knows it. Tokens of
earlier groups, and of ranks that were killed, are answered in vain, and replaced by the next ones::

    rank 1   asks_1 = 7f3a                09c1/7f3a     keys 09c1/...
    rank 0               7f3a = 09c1                    keys 09c1/...
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_PAUSES = (0.001, 0.02)  # seconds between two looks: at first, and at most


def store_of_next_group(environment: ClusterEnvironment, timeout: timedelta, purpose: str = "group") -> Store:
    """A store that nobody has written to before. All processes call it, for each group.

    Args:
        timeout: the store's timeout, and how long a rank waits for the others.
        purpose: what the processes meet for. Ranks that meet for something else aren't counted.

    Raises:
        TimeoutError: the others have not come.
    """
    store = script_store(environment, timeout)
    asks = f"lightning_parallel/{purpose}/asks_"
    if environment.global_rank() > 0:
        token = uuid.uuid4().hex
        store.set(f"{asks}{environment.global_rank()}", token)
        for _ in _looks(timeout, "Rank 0 has not come"):
            if store.check([token]):
                break
        meeting = PrefixStore(store.get(token).decode(), store)
        meeting.set(token, "")
        return meeting
    name, answered = uuid.uuid4().hex, set[str]()
    meeting = PrefixStore(name, store)
    keys = [f"{asks}{rank}" for rank in range(1, environment.world_size())]
    for _ in _looks(timeout, f"Not all of the other {len(keys)} ranks have come") if keys else ():
        if store.check(keys):
            tokens = [token.decode() for token in store.multi_get(keys)]
            for token in set(tokens) - answered:
                store.set(token, name)
            answered.update(tokens)
            if meeting.check(tokens):  # none of them is one of an earlier meeting
                break
    return meeting


def _looks(timeout: timedelta, missing: str) -> Iterator[None]:
    """Looks, with pauses between them that get longer, until the time is over."""
    end = time.monotonic() + timeout.total_seconds()
    pause, longest = _PAUSES
    while time.monotonic() <= end:
        yield
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise TimeoutError(f"{missing} to make a process group. The cause is in the output of the others.")


def script_store(environment: ClusterEnvironment, timeout: timedelta) -> Store:
    """The store of all processes of a script. It lives as long as this process; that of torchrun's agents as long as
    the agents."""
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # torch's rendezvous reads them
    return _store(address, port, environment.global_rank(), environment.world_size(), timeout)


def end() -> None:
    """Give up the store, before the interpreter is finalized."""
    _store.cache_clear()


@lru_cache(maxsize=1)
def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Make the store, or return the one that was made with the same arguments."""
    store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    return store
