"""What every cluster is told: its machines, their devices, and how the processes there meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from lightning_parallel.set_up.options import Seconds
from lightning_parallel.settings import Count, Natural, check
from recipes import IN_CHECKOUT, ROOT


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The settings that all launchers share. conf/cluster/base/common.yaml says what they mean.
    A strategy takes ``backend`` and ``timeout`` from here unless its own are set."""

    devices: Count
    nodes: Count = 1
    threads: Count = 1
    backend: Literal["gloo", "nccl"] | None = None
    timeout: Seconds = 1800
    max_restarts: Natural = 0
    interface: str | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of workers that the environment doesn't set."""
        wanted = {"OMP_NUM_THREADS": str(self.threads)}
        new = {name: value for name, value in wanted.items() if name not in os.environ}
        new |= interface_variables(self.interface)
        if not IN_CHECKOUT:  # this package is found like any other
            return new
        return new | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def interface_variables(interface: str | None) -> dict[str, str]:
    """By which gloo and NCCL meet on a network interface; none where they choose, or where the environment says it."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface is not None else ()
    return {name: str(interface) for name in names if name not in os.environ}
