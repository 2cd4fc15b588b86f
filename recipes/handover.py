"""Workers that are there already: torchrun, MPI or a cloud's launcher has started this program once for each device.

The process of rank 0 composes the config, and hands it on. The others wait for it, so that all have the same one, in
the same folder, and the command line is checked once::

    rank 0    compose, check, write    hand on ->  work
    rank 1    .......................  receive ->  work

When torchrun starts the processes again after a failure, its store still has the config, as long as the agent lives
that has the store. Rank 0 takes that one, so that the run goes on in its folder. MPI has no such store.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import yaml
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_parallel.ranks import rendezvous
from recipes.launchers.cluster import interface_variables
from recipes.processes import RESTARTS

_CONFIG, _STARTS = "recipes/config", "recipes/starts"  # keys of the store that lives longest
_PURPOSE, _HANDED_ON = "config", "handed_on"  # a meeting, and a key of it
_PATIENCE = timedelta(minutes=30)  # that the others have while rank 0 composes
_LEAVING = timedelta(minutes=1)  # in which the others hear that there is no run


def config_of_run() -> str | None:
    """The config of the run that this process belongs to; None on rank 0 of a new run, which is to compose it.

    Raises:
        SystemExit: rank 0 has none, and has said why.
    """
    environment = TorchElasticEnvironment()
    store = rendezvous.script_store(environment, _PATIENCE)
    if environment.global_rank() == 0:
        return hand_on(store.get(_CONFIG).decode()) if store.check([_CONFIG]) else None
    meeting = rendezvous.store_of_next_group(environment, _PATIENCE, _PURPOSE)
    config, number = json.loads(meeting.get(_HANDED_ON))
    if config is None:
        raise SystemExit(number)
    return _received(config, number)


def shared(config_file: Path) -> str:
    """The config of processes that all have its file. With it they hear how often torchrun has started them."""
    if TorchElasticEnvironment().global_rank() == 0:
        return hand_on(config_file.read_text())
    config = config_of_run()
    assert config is not None  # rank 0 has the file
    return config


def hand_on_the_end(code: int) -> None:
    """Rank 0 leaves. If it has had no config for the others, they wait for one, and are to end with this code."""
    if RESTARTS in os.environ:  # it has
        return
    with suppress(RuntimeError, TimeoutError):  # they have left
        meeting = rendezvous.store_of_next_group(TorchElasticEnvironment(), _LEAVING, _PURPOSE)
        meeting.set(_HANDED_ON, json.dumps([None, code]))


def hand_on(config: str) -> str:
    """Tell the other ranks, and those that torchrun may start again."""
    environment = TorchElasticEnvironment()
    store = rendezvous.script_store(environment, _PATIENCE)
    restarts = store.add(_STARTS, 1) - 1
    store.set(_CONFIG, config)
    meeting = rendezvous.store_of_next_group(environment, _PATIENCE, _PURPOSE)
    meeting.set(_HANDED_ON, json.dumps([config, restarts]))
    return _received(config, restarts)


def _received(config: str, restarts: int) -> str:
    os.environ[RESTARTS] = str(restarts)
    os.environ |= interface_variables(yaml.safe_load(config)["cluster"].get("interface"))
    return config
