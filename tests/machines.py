"""Two machines on this one: network namespaces, each with an address of its own.

    with two_machines(Link(delay=0.001, rate=1e9)) as (first, second):
        subprocess.run([*first.enter, "command"])

Packets of a link wait in a process between them, which is what ``tc netem`` does where the kernel has that::

    first: 10.99.0.1 --- delay, rate --- 10.99.0.2 : second
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_TUN = Path("/dev/net/tun")
# <linux/if_tun.h>: TUNSETIFF; IFF_TUN | IFF_NO_PI
_SET_INTERFACE, _PACKETS_ONLY = 0x400454CA, 0x1001
_INTERFACE = "eth0"
_PACKET = 9000  # bytes at most, as in a data centre


@dataclass(frozen=True)
class Machine:
    """Attributes: enter: what stands before a command to run it there; address; interface: of its network."""

    enter: list[str]
    address: str
    interface: str


@dataclass(frozen=True)
class Link:
    """Attributes: delay: seconds, each way; rate: bits in a second, each way."""

    delay: float
    rate: float


def missing() -> str:
    """What this machine lacks for a link: a reason to skip; empty for nothing."""
    if not os.access(_TUN, os.W_OK):
        return f"no {_TUN}"
    name = f"probe{os.getpid()}"
    return "" if _ip("netns", "add", name) and _ip("netns", "delete", name) else "network namespaces can't be made"


@contextlib.contextmanager
def two_machines(link: Link | None = None) -> Iterator[list[Machine]]:
    """Two namespaces; without a link, on a machine where they can't be made, both are this machine.

    Raises:
        RuntimeError: there is to be a link, and it can't be made.
    """
    names = [f"lp{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        made = True
        for name in names:
            made = made and _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        if made and link is not None:
            stack.enter_context(_relay(names, link))
        elif made:
            made = _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        made = made and all(_ip("link", "set", name, "netns", name) for name in names)
        if not made:
            if link is not None:
                raise RuntimeError("no namespaces with a link between them can be made here")
            yield [Machine([], "127.0.0.1", "lo")] * 2
            return
        for number, name in enumerate(names, 1):
            assert _ip("-n", name, "link", "set", name, "name", _INTERFACE)
            assert _ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", _INTERFACE)
            assert all(_ip("-n", name, "link", "set", each, "up") for each in ("lo", _INTERFACE))
        # Not `ip netns exec`: it mounts another /sys, without the control groups that SLURM looks for.
        enter = [["nsenter", f"--net=/run/netns/{name}"] for name in names]
        yield [Machine(words, f"10.99.0.{number}", _INTERFACE) for number, words in enumerate(enter, 1)]


def _ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _relay(names: list[str], link: Link) -> Iterator[None]:
    """A process that makes the two interfaces, and passes on what comes."""
    command = [sys.executable, "-P", __file__, *names, str(link.delay), str(link.rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError("the interfaces of a link can't be made")
            yield
        finally:
            process.kill()


# -- the process -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Way:
    """One direction. Attributes: into: where packets go; free: when the line is; waiting: packets by their time."""

    into: int
    free: float = 0.0
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


def _interface(name: str) -> int:
    file = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH", name.encode(), _PACKETS_ONLY))
    subprocess.run(["ip", "link", "set", name, "mtu", str(_PACKET)], check=True)
    return file


def _pass_on(names: list[str], delay: float, rate: float) -> None:
    first, second = (_interface(name) for name in names)
    ways = {first: _Way(second), second: _Way(first)}
    print("ready", flush=True)
    while True:
        due = [way.waiting[0][0] for way in ways.values() if way.waiting]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for file in select.select(ways, [], [], timeout)[0]:
            _take(file, ways[file], delay, rate)
        for way in ways.values():
            while way.waiting and way.waiting[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # the interface is down, or its queue is full: the packet is lost
                    os.write(way.into, way.waiting.popleft()[1])


def _take(file: int, way: _Way, delay: float, rate: float) -> None:
    while True:
        try:
            packet = os.read(file, _PACKET + 100)
        except OSError:  # there is none
            return
        way.free = max(way.free, time.monotonic()) + 8 * len(packet) / rate
        way.waiting.append((way.free + delay, packet))


if __name__ == "__main__":
    _pass_on(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
