"""What a rank has in memory: resident pages of the process, and exactly what training keeps there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

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
