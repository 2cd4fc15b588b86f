"""Starts the worker processes of one run with torch's elastic agent, and leaves the parent as it was.

The agent gives each run its own processes, world size and port, so that the jobs of a sweep cannot disturb
one another. Lightning's subprocess launcher cannot: under ``--multirun`` each of its children runs the sweep
again.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import CompactHydraException

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = "RECIPES_LAUNCHER"  # set for workers: the process that launched them and prints their error
_SHUTDOWN_SECONDS = 10  # what workers get to end themselves after Ctrl-C or a peer's failure
_PACKAGES = frozenset({"lightning_parallel", "recipes", "lightning"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong in a worker."""

    rank: int
    message: str
    traceback: str | None

    @property
    def is_refusal(self) -> bool:
        """Whether one of these packages or Lightning refused a setting: then the message says all."""
        files = re.findall(r'^  File "(.+)", line', self.traceback or "", re.MULTILINE)
        ours = bool(files) and not _PACKAGES.isdisjoint(Path(files[-1]).parts)
        return ours and self.message.split(":")[0].endswith(("ValueError", "MisconfigurationException"))

    def as_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "message": self.message, "traceback": self.traceback}


class WorkersFailed(CompactHydraException):
    """A worker ended with an error. Hydra prints its message without a stack trace of this process."""

    def __init__(self, failure: Failure, processes: int) -> None:
        self.failure = failure
        self.processes = processes
        detail = failure.message if failure.is_refusal or failure.traceback is None else failure.traceback
        super().__init__(f"rank {failure.rank} of {processes} failed:\n{detail.rstrip()}")


def launch(config_file: Path, processes: int, threads: int) -> None:
    """Runs ``python -m recipes.worker config_file`` in ``processes`` processes and waits for them.

    Args:
        config_file: a resolved config.
        processes: workers, all on this machine; 1 too.
        threads: OMP_NUM_THREADS of each, unless the environment sets it.

    Raises:
        WorkersFailed: a worker failed; the others have been ended.
        KeyboardInterrupt: this process got SIGINT or SIGTERM; the workers have been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        _signals_and_environment_restored(),
        _quiet_agent(),
        tempfile.TemporaryDirectory(prefix="recipes-") as scratch,
    ):
        os.environ[LAUNCHED] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        agent = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",  # port 0: the system gives a free one
                local_addr="localhost",  # the machine's own name need not resolve
                max_restarts=0,
                monitor_interval=0.1,
                shutdown_timeout=_SHUTDOWN_SECONDS,
                logs_specs=DefaultLogsSpecs(log_dir=scratch),
            ),
            sys.executable,
        )
        try:
            agent("-u", "-m", "recipes.worker", str(config_file))
        except ChildFailedError as error:
            raise WorkersFailed(_root_cause(error), processes) from None
        except SignalException as error:
            raise KeyboardInterrupt(str(error)) from None


def _root_cause(error: ChildFailedError) -> Failure:
    """The worker that failed first: the others often only lost their connection to it."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, int]:
        _, failure = item
        file = Path(failure.error_file)
        # A worker killed by a signal left no file, and cannot be the victim of a peer.
        return (True, file.stat().st_mtime_ns) if file.is_file() else (failure.exitcode >= 0, 0)

    rank, failure = min(error.failures.items(), key=order)
    content: Any = failure.error_file_data.get("message")
    if isinstance(content, dict):
        return Failure(rank, str(content["message"]), str(content["extraInfo"]["py_callstack"]))
    if failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        return Failure(rank, f"killed by {failure.signal_name()}{hint}", None)
    return Failure(rank, f"ended with exit code {failure.exitcode}", None)


@contextmanager
def _signals_and_environment_restored() -> Iterator[None]:
    """The agent installs signal handlers and environment variables and takes neither back.

    Left in place, Ctrl-C would end one job of a sweep, and the sweep would go on.
    """
    environment = os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: it was not set from Python, and cannot be set back from it
                signal.signal(number, handler)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's own account of a failure is left out: the worker's error says more."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
