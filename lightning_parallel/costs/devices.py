"""What a device can do: measured here, or described by numbers of its maker.

A device is a few rates, and a message takes ``latency + bytes / rate``. Ranks of a node are joined by links, nodes by a
network, to which each device has a port of its own. Collectives are rings. So contention, what lies between nodes, and
collectives that choose their algorithm by size aren't modelled.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lightning_parallel.comparison.timing import kept_waiting, threads_of_rank
from lightning_parallel.private.group_on_paper import Kind, Sent

Channels = tuple[int, int]  # for the collectives of a group, and for messages between two ranks; (0, 0) without NCCL

_EFFICIENCY = 0.5  # of the peak, which matrix products of layers reach on a described device
_SIZES = 2**12, 2**22  # bytes of messages
_BEFORE, _SUMS = 2, 20
_ROWS = 2**9  # of the products between sums, which take some milliseconds
_LIMIT = timedelta(seconds=30)
_FEWEST, _MOST = 5, 50  # runs of what is timed, unless they take long
_BUSY = 2**10  # rows of the products that keep a core busy, each of some milliseconds without Python


@dataclass(frozen=True)
class Device:
    """A kind of device, and how several of them are linked.

    Attributes:
        name: in words.
        operations: floating-point ones a second that matrix products reach.
        memory_rate: bytes a second that it reads and writes.
        link: bytes a second from one device to another.
        latency: seconds until a message of no size has arrived.
        hop: seconds of each further step of a ring.
        node: the number of devices that links join.
        network: bytes a second from a device to one of another node.
        overlaps: do messages travel while it computes? Not where a CPU's cores do both.
        measured: were layers run on it? If not, their times are the larger of those by operations and by bytes.
        at_once: ranks that compute at one time, where they share a machine's cores; None where each has a device.
        channels: that NCCL opens for a group's collectives, and for messages between two ranks; none over gloo.
    """

    name: str
    operations: float
    memory_rate: float
    link: float
    latency: float
    hop: float
    node: int = 8
    network: float = math.inf
    overlaps: bool = True
    measured: bool = False
    at_once: int | None = None
    channels: Channels = (0, 0)

    def speed(self, computing: int) -> float:
        """That of each of so many ranks that compute at one time. 1 is that of layers as they were timed: with all
        cores busy, and no more ranks than cores."""
        return 1.0 if self.at_once is None else min(1.0, self.at_once / computing)

    def message(self, nbytes: float, distance: int = 1) -> float:
        """Seconds that one message takes, to the device that is so many ranks away."""
        return self.latency + nbytes / (self.link if distance < self.node else self.network)

    def collective(self, kind: Kind, nbytes: float, ranks: int, distance: int = 1) -> float:
        """Seconds until each rank has its result.

        Args:
            nbytes: of the whole, of which a gather's or a scattered sum's ranks have a part each.
            distance: between neighbours in the group, in ranks. The group's devices in one node use all their ports.
        """
        if ranks == 1:
            return 0.0
        rounds = 2 if kind == "all_reduce" else 1  # a sum is scattered, and then gathered
        rate = self.link
        if ranks * distance > self.node:
            rate = min(rate, max(1, self.node // distance) * self.network)
        return rounds * (self.latency + (ranks - 2) * self.hop + (ranks - 1) / ranks * nbytes / rate)

    def collectives(self, sent: Iterable[Sent], ranks: int) -> float:
        """Seconds of collectives, one after the other."""
        return sum(self.collective(kind, nbytes, ranks) for kind, nbytes in sent)

    def passes(self, nbytes: float) -> float:
        """Seconds for work whose results are so many bytes, and for which as many are read."""
        return 2 * nbytes / self.memory_rate

    def computes(self, operations: float, nbytes: float) -> float:
        """Seconds of work that isn't tried: by its operations, and by the bytes of its results."""
        return operations / self.operations + self.passes(nbytes)


# From the makers' data sheets: dense operations a second of bfloat16 and of float32 (without TF32), memory, a link's
# bytes in one direction. The last one is a usual network's: a port of 200 Gb/s for each A100, 400 for each H100 and
# H200, and 100 for eight L4.
_DESCRIBED: Mapping[str, tuple[float, float, float, float, float]] = MappingProxyType(
    {
        "a100": (312e12, 19.5e12, 2.0e12, 300e9, 25e9),
        "h100": (989e12, 67e12, 3.35e12, 450e9, 50e9),
        "h200": (989e12, 67e12, 4.8e12, 450e9, 50e9),
        "l4": (121e12, 30e12, 0.3e12, 32e9, 1.6e9),
    }
)
# As NCCL logs them where NVLink joins the devices of a node, and where PCIe does.
_NVLINK: Channels = (24, 32)
_PCIE: Channels = (2, 2)
_WITH_NVLINK = ("a100", "a800", "h100", "h200", "h800", "h20", "b200", "b300")


def described(name: str, *, halves: bool) -> Device:
    """A device by its name.

    Args:
        halves: is the work done in bfloat16 or float16?

    Raises:
        ValueError: there is no such description.
    """
    if name not in _DESCRIBED:
        known = ", ".join(_DESCRIBED)
        raise ValueError(f"device={name!r}: there are descriptions of {known}; 'here' is tried.")
    of_halves, of_floats, memory_rate, link, network = _DESCRIBED[name]
    operations = _EFFICIENCY * (of_halves if halves else of_floats)
    return Device(
        name, operations, memory_rate, link, latency=20e-6, hop=3e-6, network=network, channels=_channels(name)
    )


def _channels(name: str) -> Channels:
    """By a device's name, as its maker or a plan writes it."""
    words = name.lower()
    return _NVLINK if any(each in words for each in _WITH_NVLINK) and "pcie" not in words else _PCIE


def here(device: torch.device, ranks: int) -> Device:
    """This machine's device, measured in a second, for so many ranks on it. Links between CPUs are gloo's, between two
    threads; those between GPUs can't be measured by one process, so they count as PCIe's."""
    size = 2**9 if device.type == "cpu" else 2**12
    one = torch.randn(size, size, device=device)
    many = torch.randn(2**21, device=device)
    with as_one_of(ranks, device):
        product, passed = seconds_of([lambda: one @ one, lambda: many * 2], device)
    operations, memory_rate = 2 * size**3 / product, 2 * many.nbytes / passed
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device)
        return Device(
            name, operations, memory_rate, 25e9, latency=30e-6, hop=10e-6, measured=True, channels=_channels(name)
        )
    with as_one_of(1, device, threads_of_rank(ranks)):
        latency, link = over_gloo()
    return Device(
        "this CPU",
        operations,
        memory_rate,
        link,
        latency,
        hop=latency,
        overlaps=False,
        measured=True,
        at_once=_at_once(ranks),
    )


def over_gloo() -> tuple[float, float]:
    """What a message between processes of this machine takes over gloo: the seconds until one of no size is there, and
    the bytes that it moves a second.

    Two threads that compute sum tensors, for which each sends two messages with half of the bytes. A sum is ready when
    the slower of them has come to it, and a thread that waits may go on a tick of the kernel's clock too late. Both are
    in the figures, which scatter up to threefold from one time to the next: more than sums, gathers and messages to one
    rank differ. So these count alike.
    """
    few, many = map(_seconds_of_sum, _SIZES)
    return few / 2, (_SIZES[1] - _SIZES[0]) / max(many - few, 1e-4)


def _seconds_of_sum(nbytes: int) -> float:
    store, together = HashStore(), threading.Barrier(2, timeout=_LIMIT.total_seconds())

    def member(rank: int) -> float:
        group: Any = ProcessGroupGloo(store, rank, 2, _LIMIT)
        tensor, (one, result) = torch.ones(nbytes // 4), torch.randn(2, _ROWS, _ROWS)
        times = []
        together.wait()
        for _ in range(_BEFORE + _SUMS):
            torch.mm(one, one, out=result)
            start = time.perf_counter()
            group.allreduce([tensor]).wait()
            times.append(time.perf_counter() - start)
        return fmean(times[_BEFORE:])

    with ThreadPoolExecutor(2) as threads:
        return fmean(threads.map(member, range(2)))  # raises what one of them has raised


@contextmanager
def as_one_of(ranks: int, device: torch.device, threads: int | None = None) -> Iterator[None]:
    """Inside, this process computes on a CPU with as many threads as one of some ranks on this machine has, while the
    other cores are as busy as theirs."""
    if device.type != "cpu":
        yield
        return
    before, over = torch.get_num_threads(), threading.Event()
    torch.set_num_threads(threads or threads_of_rank(ranks))

    def computes() -> None:
        one, result = torch.randn(2, _BUSY, _BUSY).unbind()
        while not over.is_set():
            torch.mm(one, one, out=result)

    others = [threading.Thread(target=computes, daemon=True) for _ in range(_at_once(ranks) - 1)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        over.set()
        for other in others:
            other.join()
        torch.set_num_threads(before)


def _at_once(ranks: int) -> int:
    return min(ranks, max(1, (os.cpu_count() or 1) // threads_of_rank(ranks)))


def seconds_of(works: Sequence[Callable[[], object]], device: torch.device, *, least: float = 0.03) -> list[float]:
    """Of each of some works, the median of several runs in turn, after a first one, which loads what they need. The
    time in which other programs keep this thread from a core isn't counted.

    Args:
        least: the seconds that all runs of all works take together, unless there are many.
    """
    for work in works:
        work()
    found: list[list[float]] = []
    total = 0.0
    while len(found) < _FEWEST or (total < least and len(found) < _MOST):
        found.append([_seconds(work, device) for work in works])
        total += sum(found[-1])
        if total > len(works):  # long ones needn't be repeated often
            break
    return [median(times) for times in zip(*found, strict=True)]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start, before = time.perf_counter(), kept_waiting()  # in this order: what comes between isn't taken off
    work()
    wait()
    waited = kept_waiting() - before
    return time.perf_counter() - start - waited
