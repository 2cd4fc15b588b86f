"""Where the time of threads goes: computing, waiting for a core, or blocked; told by the kernel, thread by thread.

A thread that waits for Python's interpreter lock, or for a message, is blocked. One that could run and has no core is
queued: that is the machine's load, not the strategy's doing.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self


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
