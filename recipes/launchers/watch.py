"""Ends the workers that don't end by themselves once one of them has failed.

The elastic agent asks them to end, by SIGTERM, and waits 30 s. A worker that is stopped (SIGSTOP, a debugger) can't
hear it, and one that waits for a peer only notes it, since it may be a scheduler's.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_LOOKS = 0.5  # seconds between two looks


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
    """The workers that a process has started, this one if none is named, and that are there."""
    found = []
    for child in (launcher or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):
            if "recipes.worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def watched(errors: Path, patience: float) -> Iterator[Ended]:
    """While it is entered, workers end within ``patience`` after the first error.

    Args:
        errors: the folder where the agent lets workers write their errors.
        patience: seconds that a worker gets to end itself.
    """
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
