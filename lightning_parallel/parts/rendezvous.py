"""Where the processes of a script meet to make a process group, each time that they make one.

torch keeps the store of a process group as long as the group, under the same keys for each group. After an error, one
process may still find the store of the old group, and in it the addresses of connections that are closed. Here one
store lives as long as the script, and each group has keys of its own::

    group 0   <store>/0/...     ended by an error
    group 1   <store>/1/...     of the script's next Trainer
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous


def store_of_next_group(environment: ClusterEnvironment, timeout: timedelta) -> Store:
    """A store that no earlier process group has written to. All processes call it, for each group.

    Args:
        environment: where they meet, and which of them this is.
        timeout: of the store.
    """
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # torch's rendezvous reads them
    rank = environment.global_rank()
    store = _store(address, port, rank, environment.world_size(), timeout)
    # torchrun's store outlives the processes that it starts again, of which some may have made no group.
    start = f"lightning_parallel/start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    count = store.add(f"{start}/groups_of/{rank}", 1)
    return PrefixStore(f"{start}/{count}", store)


def end() -> None:
    """Give up the store, before the interpreter is finalized."""
    _store.cache_clear()


@lru_cache(maxsize=1)
def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The arguments say which store it is."""
    store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    return store
