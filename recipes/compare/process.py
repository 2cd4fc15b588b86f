"""What the kernel knows of a rank: the memory of its process, and where the time of its threads goes.

A thread that waits for Python's interpreter lock, or for a message, is blocked. One that could run and has no core is
queued: that is the machine's load, not the strategy's doing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.absent.tensor import AbsentTensor


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _status("VmRSS")


def peak_resident() -> int:
    """The most bytes there were since :func:`forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def held(module: LightningModule, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Bytes of the parameters, gradients and optimizer state of this rank: of its shards, its stage."""
    parameters = [p for p in module.parameters() if not isinstance(p, AbsentTensor)]
    state = [value for each in optimizers for values in each.state.values() for value in values.values()]
    return {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _nbytes([value for value in state if isinstance(value, Tensor)]),
    }


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def devices_of(root: torch.device, others: Iterable[torch.device] | None) -> list[torch.device]:
    """The GPUs that this process uses, each once; none on the CPU."""
    return [device for device in dict.fromkeys(others or [root]) if device.type == "cuda"]


class Times:
    """Seconds of one thread.

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

    def shares(self) -> dict[str, float]:
        """Fractions of the time on the clock."""
        # The kernel books at its ticks: of a short while it may count a little more than went by.
        whole = max(self.wall, self.computing + self.queued) or 1.0
        computing, queued = self.computing / whole, self.queued / whole
        return {"computing": computing, "queued": queued, "blocked": max(0.0, 1 - computing - queued)}
