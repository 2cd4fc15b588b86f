"""Two machines on this one: network namespaces, each with an address of its own.

with two_machines() as (first, second):
    subprocess.run([*first.enter, "command"])
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_INTERFACE = "eth0"


@dataclass(frozen=True)
class Machine:
    """Attributes: enter: what stands before a command to run it there; address; interface: of its network."""

    enter: list[str]
    address: str
    interface: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two namespaces. On a machine where they can't be made both are this machine, which there is no way to enter."""
    names = [f"lp{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        made = True
        for name in names:
            made = made and _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        made = made and _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        made = made and all(_ip("link", "set", name, "netns", name) for name in names)
        if not made:
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
