"""Workers on this machine, started with torch's elastic agent.

The agent gives each run its own processes, world size and port, so the jobs of a sweep don't disturb each other.
Lightning's subprocess launcher can't do this: under ``--multirun`` each of its children runs the sweep again.

Once a worker has failed, the agent asks the others to end, by SIGTERM, and waits 30 s. A worker that is stopped
(SIGSTOP, a debugger) can't hear it, and one that waits for a peer only notes it, since it may be a scheduler's. Those
are killed from here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from recipes import record
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, Preempted, WorkersFailed
from recipes.processes import LAUNCHED, PREEMPTING, REQUEUE, RESTARTS, WORKER, how_it_ended

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

log = logging.getLogger(__name__)

_LOOKS = 0.5  # seconds between two looks at the workers
_SHUTDOWN_SECONDS = 10  # what workers get to end themselves after Ctrl-C or a peer's failure
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the agent ends the workers
_KILLED = tuple(-number for number in PREEMPTING)  # exit codes: before a worker listens to them
# What to name of several workers that have ended, the first of these: killed from outside; an error of its own; left
# after a signal; its peer was lost; had to be killed by the launcher.
_GONE, _OWN, _LEFT, _VICTIM, _SLOW = range(5)


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Cluster):
    """Starts a run's workers on this machine. When they have ended, this process is as it was before."""

    oversubscribe: bool = False

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`. A run that the strategies refuse
        isn't started again: it would be refused again."""
        for restarts in range(self.max_restarts + 1):
            try:
                return self._run(config_file, processes, restarts)
            except WorkersFailed as error:
                if restarts == self.max_restarts or error.failure.is_refusal:
                    raise
                record.end(config_file.parent, "failed", error.failure.as_dict())
                record.update(config_file.parent, status=record.STARTING)
                log.warning("%s", error)
                log.warning("restart %d of %d, from the newest whole checkpoint", restarts + 1, self.max_restarts)

    def _run(self, config_file: Path, processes: int, restarts: int) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        with (
            _signals_and_environment_restored(),
            _quiet_agent(),
            tempfile.TemporaryDirectory(prefix="recipes-") as scratch,
        ):
            handed_on = _hand_on(PREEMPTING)
            os.environ |= {**self.variables, LAUNCHED: str(os.getpid()), RESTARTS: str(restarts)}
            agent = elastic_launch(
                LaunchConfig(
                    min_nodes=1,
                    max_nodes=1,
                    nproc_per_node=processes,
                    run_id=uuid.uuid4().hex,
                    rdzv_backend="c10d",
                    rdzv_endpoint="localhost:0",  # port 0: the system gives a free one
                    local_addr="localhost",  # the machine's own name need not resolve
                    max_restarts=0,  # it would take a preempted run for a failed one
                    monitor_interval=0.1,
                    shutdown_timeout=_SHUTDOWN_SECONDS,
                    signals_to_handle=",".join(number.name for number in _ENDING),
                    logs_specs=DefaultLogsSpecs(log_dir=scratch),
                ),
                sys.executable,
            )
            try:
                with watched(Path(scratch), _SHUTDOWN_SECONDS) as ended:
                    agent(*WORKER, str(config_file))
            except ChildFailedError as error:
                raise _reason(error, processes, config_file.parent, ended, preempted=bool(handed_on)) from None
            except SignalException as error:
                raise KeyboardInterrupt(str(error)) from None


def _hand_on(signals: Sequence[signal.Signals]) -> set[int]:
    """From now on, pass these signals on to the workers. Returns those that came, as they come."""
    handed_on: set[int] = set()

    def hand_on(number: int, frame: Any) -> None:
        handed_on.add(number)
        there = workers()
        for worker in there:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
        if not there:  # it would be lost
            raise Preempted

    for number in signals:
        signal.signal(number, hand_on)
    return handed_on


def _reason(
    error: ChildFailedError, processes: int, folder: Path, ended: Ended, *, preempted: bool
) -> Preempted | WorkersFailed:
    """Why the workers have ended: the one that was first. The others often only lost their connection to it.

    Args:
        error: of the agent.
        ended: those that had to be killed.
        preempted: this process has passed a signal on.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        rank, failure = item
        file = Path(failure.error_file)
        if file.is_file() and not _described(rank, failure).is_lost_connection:
            return _OWN, file.stat().st_mtime_ns
        if failure.pid in ended.slow:
            return _SLOW, 0
        if file.is_file():
            return _VICTIM, file.stat().st_mtime_ns
        # One that left no file can't be the victim of a peer. But the agent ends those that wait for one, by SIGTERM.
        return (_LEFT if failure.exitcode in (REQUEUE, *_KILLED) else _GONE), 0

    rank, failure = min(error.failures.items(), key=order)
    if failure.pid in ended.stopped:
        said = "stopped (SIGSTOP), and did not answer the others"
        return WorkersFailed(Failure(rank, said, None, record.place(folder, rank)), processes)
    codes = {each.exitcode for each in error.failures.values()} if preempted else {failure.exitcode}
    if not preempted and order((rank, failure))[0] == _OWN:
        codes = set()  # the agent's SIGTERM may have met it while it left with its error
    if not codes.isdisjoint((REQUEUE, *_KILLED)):
        return Preempted()
    return WorkersFailed(_described(rank, failure, record.place(folder, rank)), processes)


def _described(rank: int, failure: ProcessFailure, place: str = "") -> Failure:
    content: Any = failure.error_file_data.get("message")
    if isinstance(content, dict):
        return Failure(rank, str(content["message"]), str(content["extraInfo"]["py_callstack"]), place)
    return Failure(rank, how_it_ended(failure.exitcode), None, place)


@contextmanager
def _signals_and_environment_restored() -> Iterator[None]:
    """Undo what the agent leaves: its signal handlers and environment variables.

    With its handlers, Ctrl-C would end one job of a sweep, and the sweep would go on.
    """
    environment = os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in (*_ENDING, *PREEMPTING)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: it was not set from Python, and can't be set back from it
                signal.signal(number, handler)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's own report of a failure: the worker's error says more."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@dataclass(slots=True)
class Ended:
    """The workers that had to be killed, by their process.

    Attributes:
        stopped: those that were stopped when another one failed.
        slow: those that were still there some seconds later.
    """

    stopped: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)


def workers(launcher: psutil.Process | None = None) -> list[psutil.Process]:
    """The workers that a process has started (this one if none is named) and that are there."""
    found = []
    for child in (launcher or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):
            if "recipes.worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def watched(errors: Path, patience: float) -> Iterator[Ended]:
    """Inside, workers end within so many seconds after the first error that the agent keeps in a folder."""
    ended, over = Ended(), threading.Event()
    watch = threading.Thread(target=_watch, args=(errors, patience, ended, over), daemon=True)
    watch.start()
    try:
        yield ended
    finally:
        over.set()
        watch.join()


def _watch(errors: Path, patience: float, ended: Ended, over: threading.Event) -> None:
    while not any(errors.rglob("error.json")):
        if over.wait(_LOOKS):
            return
    until = time.monotonic() + patience
    while time.monotonic() < until:
        for worker in workers():
            if _is_stopped(worker):
                _kill(worker, ended.stopped)
        if over.wait(_LOOKS):
            return
    for worker in workers():
        _kill(worker, ended.slow)


def _is_stopped(worker: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return worker.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _kill(worker: psutil.Process, note: set[int]) -> None:
    note.add(worker.pid)
    with suppress(psutil.NoSuchProcess):
        worker.send_signal(signal.SIGKILL)
