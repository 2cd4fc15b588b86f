"""Workers that are there already: torchrun, MPI or a cloud's launcher has started this program once for each device.

The process of rank 0 composes the config, and hands it on. The others wait for it, so that all have the same one, in
the same folder, and the command line is checked once::

    rank 0    compose, check, write    meet ->  work
    rank 1    .......................  meet ->  work

When torchrun starts the processes again after a failure, its store still has the config. Rank 0 takes that one, so that
the run goes on in its folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_parallel.parts import rendezvous
from recipes.launchers.cluster import Cluster
from recipes.processes import RESTARTS
from recipes.worker import start

_CONFIG, _STARTS = "recipes/config", "recipes/starts"  # keys of the store that lives longest
_TOLD = "told"  # key of a meeting
_PATIENCE = timedelta(minutes=30)  # that the others have while rank 0 composes


@dataclass(frozen=True, kw_only=True)
class TorchrunLauncher(Cluster):
    """Makes a worker of this process, which torchrun or something like it has started, one of several.

    It starts nothing, so ``max_restarts`` is torchrun's ``--max-restarts``.
    """

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`, but that this process is worker 0.

        Raises:
            SystemExit: a scheduler's signal has ended the run, with :data:`~recipes.processes.REQUEUE`.
        """
        os.environ |= self.variables
        start(_hand_on(config_file.read_text()))


def told() -> str | None:
    """The config of the run that this process belongs to.

    Returns:
        None on rank 0 of a new run, which is to compose it.
    """
    environment = TorchElasticEnvironment()
    store = rendezvous.script_store(environment, _PATIENCE)
    if environment.global_rank() == 0:
        return _hand_on(store.get(_CONFIG).decode()) if store.check([_CONFIG]) else None
    config, restarts = json.loads(rendezvous.store_of_next_group(environment, _PATIENCE).get(_TOLD))
    os.environ[RESTARTS] = str(restarts)
    return str(config)


def _hand_on(config: str) -> str:
    """Tell the other ranks, and those that torchrun may start again."""
    environment = TorchElasticEnvironment()
    store = rendezvous.script_store(environment, _PATIENCE)
    restarts = store.add(_STARTS, 1) - 1
    store.set(_CONFIG, config)
    rendezvous.store_of_next_group(environment, _PATIENCE).set(_TOLD, json.dumps([config, restarts]))
    os.environ[RESTARTS] = str(restarts)
    return config
