"""What every launcher does, and what it says when a worker fails.

A kind of cluster is one class, which its YAML file names. Here is one that starts the workers by hand::

    # conf/cluster/by_hand.yaml
    _target_: my.ByHand
    devices: 2

    class ByHand:
        def __init__(self, devices: int) -> None: ...

        def launch(self, config_file: Path, processes: int) -> None:
            for rank in range(processes):
                ...  # python -m recipes.worker CONFIG_FILE, with the environment variables that torchrun sets
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hydra.errors import CompactHydraException

REQUEUE = 75  # EX_TEMPFAIL, <sysexits.h>: exit code of a worker, and of recipes.train, that asks to be run again
_PACKAGES = frozenset({"lightning_parallel", "recipes", "lightning"})


class Launcher(Protocol):
    """Starts the workers of a run. It is made from the node ``cluster`` of the config, which has ``devices`` too."""

    def launch(self, config_file: Path, processes: int) -> None:
        """Run ``python -m recipes.worker config_file`` in ``processes`` processes, and wait for them.

        Args:
            config_file: a resolved config.
            processes: the number of workers, 1 too.

        Raises:
            WorkersFailed: a worker failed; the others have been ended.
            Preempted: a worker or this process got SIGTERM or SIGUSR1, and all workers have left.
            KeyboardInterrupt: this process got another signal that ends it; the workers have been ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong in a worker.

    Attributes:
        rank: of the worker.
        message: the type of the error and its text, or how the process ended.
        traceback: None if the process left none.
    """

    rank: int
    message: str
    traceback: str | None

    @property
    def is_refusal(self) -> bool:
        """Did one of these packages, or Lightning, refuse a setting? Then the message says everything."""
        files = re.findall(r'^  File "(.+)", line', self.traceback or "", re.MULTILINE)
        ours = bool(files) and not _PACKAGES.isdisjoint(Path(files[-1]).parts)
        return ours and self.message.split(":")[0].endswith(("ValueError", "MisconfigurationException"))

    def as_dict(self) -> dict[str, Any]:
        """The failure as ``run.json`` has it."""
        return {"rank": self.rank, "message": self.message, "traceback": self.traceback}


class Preempted(KeyboardInterrupt):
    """A scheduler is about to end the run, which has been saved if it had begun: it can be run again."""


class WorkersFailed(CompactHydraException):
    """A worker ended with an error. Hydra prints its message without a stack trace of this process."""

    def __init__(self, failure: Failure, processes: int) -> None:
        self.failure = failure
        self.processes = processes
        detail = failure.message if failure.is_refusal or failure.traceback is None else failure.traceback
        super().__init__(f"rank {failure.rank} of {processes} failed:\n{detail.rstrip()}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers of Hydra's that run jobs in other processes send the error back.
        return WorkersFailed, (self.failure, self.processes)
