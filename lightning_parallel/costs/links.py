"""What a message between processes of this machine takes over gloo, tried by two threads that compute.

They sum tensors. A sum is ready when the slower of them has come to it, and a thread that waits may go on a tick of the
kernel's clock too late. Both are in the figures, which scatter up to threefold from one time to the next: more than
sums, gathers and messages to one rank differ. So these count alike.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

_SIZES = 2**12, 2**22  # bytes
_BEFORE, _RUNS = 2, 20
_ROWS = 2**9  # of the products between sums, which take some milliseconds
_LIMIT = timedelta(seconds=30)


def over_gloo() -> tuple[float, float]:
    """The seconds until a message of no size is there, and the bytes that it moves a second. For a sum, each of two
    threads sends two messages with half of the bytes."""
    few, many = map(_seconds, _SIZES)
    return few / 2, (_SIZES[1] - _SIZES[0]) / max(many - few, 1e-4)


def _seconds(nbytes: int) -> float:
    """Of a sum of so many bytes."""
    store, together = HashStore(), threading.Barrier(2, timeout=_LIMIT.total_seconds())

    def member(rank: int) -> float:
        group: Any = ProcessGroupGloo(store, rank, 2, _LIMIT)
        tensor, (one, result) = torch.ones(nbytes // 4), torch.randn(2, _ROWS, _ROWS)
        times = []
        together.wait()
        for _ in range(_BEFORE + _RUNS):
            torch.mm(one, one, out=result)
            start = time.perf_counter()
            group.allreduce([tensor]).wait()
            times.append(time.perf_counter() - start)
        return fmean(times[_BEFORE:])

    with ThreadPoolExecutor(2) as threads:
        return fmean(threads.map(member, range(2)))  # raises what one of them has raised
