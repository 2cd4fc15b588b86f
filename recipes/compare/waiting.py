"""Where the time of threads goes: computing, waiting for a core, or blocked; told by the kernel, thread by thread.

A thread that waits for Python's interpreter lock, or for a message, is blocked. One that could run and has no core is
queued: that is the machine's load, not the strategy's doing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from lightning_parallel.threaded_replicas import data_parallel, replicate
from lightning_parallel.threaded_replicas.threads import ReplicaThreads


class Times:
    """Seconds of one thread, or the sum over several.

    Attributes:
        wall: on the clock.
        computing: on a core.
        queued: ready to run, without a core.
    """

    def __init__(self, wall: float = 0.0, computing: float = 0.0, queued: float = 0.0) -> None:
        self.wall, self.computing, self.queued = wall, computing, queued

    @classmethod
    def now(cls) -> Self:
        """Of the calling thread, since it began."""
        file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        computing, queued, _ = file.read_text().split()
        return cls(time.monotonic(), int(computing) * 1e-9, int(queued) * 1e-9)

    def since(self, start: Times) -> Times:
        return Times(self.wall - start.wall, self.computing - start.computing, self.queued - start.queued)

    def add(self, other: Times) -> None:
        self.wall += other.wall
        self.computing += other.computing
        self.queued += other.queued

    def shares(self) -> dict[str, float]:
        """Fractions of the time on the clock."""
        # The kernel books at its ticks: of a short while it may count a little more than went by.
        whole = max(self.wall, self.computing + self.queued) or 1.0
        computing, queued = self.computing / whole, self.queued / whole
        return {"computing": computing, "queued": queued, "blocked": max(0.0, 1 - computing - queued)}


class ReplicaPhases:
    """What a step of :class:`~lightning_parallel.DataParallelStrategy` spends its time on.

    Attributes:
        seconds: by phase: "scatter", "replicate", "threads" (forwards in the replicas' threads) and "reduce" (the sum
            of their gradients, in the backward).
        replicas: of the replicas' threads while they work, all together.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.replicas = Times()
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def start(self) -> None:
        """From here to :meth:`stop` this process's steps are timed, by wrapping the functions of each phase."""
        for owner, name, phase in (
            (data_parallel, "scatter", "scatter"),
            (data_parallel, "replicate", "replicate"),
            (replicate, "added", "reduce"),
        ):
            self._stack.enter_context(patch.object(owner, name, partial(self._timed, phase, getattr(owner, name))))
        apply = ReplicaThreads.apply

        def timed_apply(threads: ReplicaThreads, calls: Sequence[Callable[[], Any]], *args: Any, **kwargs: Any) -> Any:
            each = [partial(self._in_thread, call) for call in calls]
            return self._timed("threads", apply, threads, each, *args, **kwargs)

        self._stack.enter_context(patch.object(ReplicaThreads, "apply", timed_apply))

    def stop(self) -> None:
        self._stack.close()

    def _timed(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def _in_thread(self, call: Callable[[], Any]) -> Any:
        start = Times.now()
        try:
            return call()
        finally:
            spent = Times.now().since(start)
            with self._lock:
                self.replicas.add(spent)
