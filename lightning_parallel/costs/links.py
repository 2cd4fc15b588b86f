"""What messages between processes of this machine take over gloo, kind by kind, between two threads that compute.

A collective is ready when the slower of two ranks has come to it, and a thread that waits may go on a tick of the
kernel's clock too late. Both are in these figures: they are means, of messages between products of matrices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

_SIZES = 2**12, 2**22  # bytes
_BEFORE, _RUNS = 2, 20
_ROWS = 2**9  # of the products, which take some milliseconds
_LIMIT = timedelta(seconds=30)


def over_gloo() -> Mapping[str, tuple[float, float]]:
    """By kind, the seconds until a message of no size is there, and the bytes that it moves a second.

    Of two ranks each sends a whole in a message and in a sum, and half of it in a gather and in a scattered sum.
    """
    few, many = map(_seconds, _SIZES)
    found = {}
    for kind, sends in (("message", 1.0), ("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5)):
        rate = sends * (_SIZES[1] - _SIZES[0]) / max(many[kind] - few[kind], 1e-4)
        found[kind] = few[kind], rate
    return found


def _seconds(nbytes: int) -> dict[str, float]:
    """Of each kind, on a whole of so many bytes."""
    store, together = HashStore(), threading.Barrier(2, timeout=_LIMIT.total_seconds())

    def member(rank: int) -> dict[str, float]:
        group: Any = ProcessGroupGloo(store, rank, 2, _LIMIT)
        whole = torch.ones(nbytes // 4)
        parts = [*whole.clone().chunk(2)]
        own, one, result = parts[0].clone(), *torch.randn(2, _ROWS, _ROWS)

        def message() -> Any:
            return group.recv([whole], 0, 0) if rank else group.send([whole], 1, 0)

        kinds: Mapping[str, Callable[[], Any]] = {
            "message": message,
            "all_reduce": lambda: group.allreduce([whole]),
            "all_gather": lambda: group.allgather([parts], [own]),
            "reduce_scatter": lambda: group.reduce_scatter([own], [parts]),
        }
        found = {}
        for kind, begin in kinds.items():
            times = []
            together.wait()
            for _ in range(_BEFORE + _RUNS):
                torch.mm(one, one, out=result)
                start = time.perf_counter()
                begin().wait()
                times.append(time.perf_counter() - start)
            found[kind] = fmean(times[_BEFORE:])
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(member, range(2))  # raises what one of them has raised
    return {kind: fmean((first[kind], second[kind])) for kind in first}
