"""What the environment says of this process: who started it, how often, and beside how many others."""

from __future__ import annotations

import os
import signal
import sys

WORKER = ("-u", "-P", "-m", "recipes.worker")  # Python's arguments; -P: see import_from_here

LAUNCHED = "RECIPES_LAUNCHER"  # set for workers: the process that launched them and prints their error
RESTARTS = "RECIPES_RESTARTS"  # set for workers: how often their launcher has started the run again
# Not TORCHELASTIC_RESTART_COUNT: only the agent whose own worker failed counts it.
_COUNTERS = (RESTARTS, "SLURM_RESTART_COUNT")
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Set for workers before CUDA starts, where they aren't set. A GPU gets 32 queues, since a stage's streams need more
# than the usual 8. torch writes each rank's last operations of NCCL to a file when one of them times out.
ON_GPUS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler is about to end the run, which is saved

# exit codes of a worker, and of recipes.train
INTERRUPTED = 130  # after Ctrl-C
REFUSED = 78  # EX_CONFIG, <sysexits.h>: a worker's settings are wrong; they would be again
REQUEUE = 75  # EX_TEMPFAIL, <sysexits.h>: it asks to be run again


def import_from_here() -> None:
    """What a config names may be in the folder where a command is started, as under ``python -m``.

    It is called when this package has been imported, so that a package of its name in that folder can't hide it.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def restarts() -> int:
    """How often an engine has started this process's run again."""
    return max(int(os.environ.get(name) or 0) for name in _COUNTERS)


def joined() -> int:
    """How many processes torchrun, or something like it, has started beside this one and with it; 0 for none."""
    return int(os.environ.get("WORLD_SIZE", 0)) if LAUNCHED not in os.environ else 0


def missing() -> list[str]:
    """The variables without which such processes can't meet."""
    return [name for name in _NEEDED if not os.environ.get(name)]


def may_be_told() -> bool:
    """May this process get its config from another one, or from before a restart?"""
    return joined() > 0 and not missing()


def how_it_ended(code: int) -> str:
    """In words, by the exit code of a process as ``subprocess`` has it: negative after a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
