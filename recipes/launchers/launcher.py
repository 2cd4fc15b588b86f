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
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hydra.errors import CompactHydraException

from recipes import record

_REFUSALS = ("ValueError", "MisconfigurationException", "FloatingPointError")  # the last: of FiniteLoss
_OURS = ("lightning_parallel", "recipes", "lightning")  # whose refusals say everything
_LOST = re.compile(r"^([\w.]+\.)?(PeerLostError|DistBackendError|DistNetworkError)|gloo/transport")
_FRAME = re.compile(r'^  File "(.+)", line .*\n(?:    .*\n)*', re.MULTILINE)


class Launcher(Protocol):
    """Starts the workers of a run. It is made from the node ``cluster`` of the config, which has ``devices`` too."""

    def launch(self, config_file: Path, processes: int) -> str | None:
        """Run ``python -m recipes.worker config_file`` in ``processes`` processes, and wait for them.

        Args:
            config_file: a resolved config.
            processes: the number of workers, 1 too.

        Returns:
            None when the run is complete; where it isn't, but nothing is wrong either, what the user has to know.

        Raises:
            WorkersFailed: a worker failed; the others have been ended.
            Preempted: a worker or this process got SIGTERM or SIGUSR1, and all workers have left.
            KeyboardInterrupt: this process got another signal that ends it; the workers have been ended.
            LeftAlone: so it did, but the workers go on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong in a worker.

    Attributes:
        rank: of the worker.
        message: the type of the error and its text, or how the process ended.
        traceback: None if the process left none.
        place: of the rank on the axes of the layout, such as "stage 1 of 2"; empty where it isn't known.
    """

    rank: int
    message: str
    traceback: str | None
    place: str = ""

    @property
    def is_refusal(self) -> bool:
        """Did one of these packages, or Lightning, refuse a setting? Then the message says everything."""
        files = re.findall(r'^  File "(.+)", line', self.traceback or "", re.MULTILINE)
        kind = self.message.split(":")[0]
        return kind.endswith(_REFUSALS) and bool(files) and _is_in(_OURS, files[-1])

    @property
    def is_lost_connection(self) -> bool:
        """Did the rank only lose its connection to another one, which was first?"""
        return _LOST.search(self.message) is not None

    @property
    def cause(self) -> str:
        """What the terminal shows: a refusal's message, or the traceback without the frames of packages that the user
        hasn't written. The whole traceback is in ``run.json``."""
        return self.message if self.is_refusal or self.traceback is None else _shortened(self.traceback)

    def as_dict(self) -> dict[str, Any]:
        """The failure as ``run.json`` has it."""
        return {"rank": self.rank, "message": self.message, "traceback": self.traceback}


class Preempted(KeyboardInterrupt):
    """A scheduler is about to end the run, which has been saved if it had begun: it can be run again."""


class LeftAlone(KeyboardInterrupt):
    """Ctrl-C has ended the waiting for a run, which goes on."""


class WorkersFailed(CompactHydraException):
    """A worker ended with an error. Hydra prints its message without a stack trace of this process."""

    def __init__(self, failure: Failure, processes: int) -> None:
        self.failure = failure
        self.processes = processes
        place = f" ({failure.place})" if failure.place else ""
        super().__init__(f"rank {failure.rank} of {processes}{place} failed:\n{failure.cause.rstrip()}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers of Hydra's that run jobs in other processes send the error back.
        return WorkersFailed, (self.failure, self.processes)


def _shortened(traceback: str) -> str:
    """Of each error that it tells of, only the user's frames and the one that raised it."""

    def shown(frame: re.Match[str]) -> str:
        last = not traceback.startswith("  File ", frame.end())
        return "" if not last and _is_in((*_OURS, "torch"), frame[1]) else frame[0]

    return _FRAME.sub(shown, traceback)


def _is_in(packages: Iterable[str], file: str) -> bool:
    """Is it a file of these packages? They aren't imported for that."""
    specs = filter(None, map(find_spec, packages))
    folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
    return any(Path(file).is_relative_to(folder) for folder in folders)


def first_failure(folder: Path) -> Failure | None:
    """The first error of a rank; None for none. A rank that only lost its connection to another one is left out."""
    files = sorted((folder / record.ERRORS).glob("rank-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    found = [_failure(folder, file) for file in files]
    return next((failure for failure in found if not failure.is_lost_connection), None)


def _failure(folder: Path, file: Path) -> Failure:
    rank, text = int(file.stem.removeprefix("rank-")), file.read_text()
    frames = text.rfind('\n  File "')
    said = re.search(r"^\S.*", text[frames + 1 :], re.MULTILINE | re.DOTALL)  # after the last frame's lines
    return Failure(rank, said[0].rstrip() if said else text, text, record.place(folder, rank))
