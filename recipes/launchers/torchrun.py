"""Workers that are there already: torchrun, MPI or a cloud's launcher has started this program once for each device.

The process of rank 0 composes the config, and hands it on. The others wait for it, so that all have the same one, in
the same folder, and the command line is checked once::

    rank 0    compose, check, write    publish ->  work
    rank 1    wait ..........................  ->  work

When torchrun starts the processes again after a failure, the config that it still keeps is used, so that the run goes
on in its folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from recipes.launchers.cluster import Cluster
from recipes.worker import start

_CONFIG = "recipes/config"
_STORE_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, kw_only=True)
class TorchrunLauncher(Cluster):
    """Makes a worker of this process, which torchrun or something like it has started, one of several.

    It starts nothing, so ``max_restarts`` and ``threads`` are torchrun's: ``--max-restarts``, ``OMP_NUM_THREADS``.
    """

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`, but that this process is worker 0.

        Raises:
            SystemExit: a scheduler's signal has ended the run, with :data:`~recipes.processes.REQUEUE`.
        """
        os.environ |= self.variables
        _store(self.timeout).set(_CONFIG, config_file.read_text())
        start(config_file.read_text())


def told(timeout: float = 1800) -> str | None:
    """The config that rank 0 has published. The other ranks wait for it.

    Args:
        timeout: seconds to wait.

    Returns:
        None on rank 0, if it has published none before a restart.
    """
    store = _store(timeout)
    if os.environ["RANK"] == "0" and not store.check([_CONFIG]):
        return None
    return bytes(store.get(_CONFIG)).decode()


@lru_cache(maxsize=1)
def _store(timeout: float) -> Store:
    """Where the processes meet. It has to live until they have made a process group."""
    host, port, first = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0"
    serves = first and os.environ.get(_STORE_OF_TORCHRUN) != "True"
    # multi_tenant: a store of the process group has the same socket.
    wait = timedelta(seconds=timeout)
    return TCPStore(host, port, is_master=serves, timeout=wait, wait_for_workers=False, multi_tenant=True)
