"""How two ranks meet over NCCL on this machine, if they can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

RANKS = 2
_CAN_SHARE = (2, 30)  # the first version of NCCL that lets ranks share a GPU
# Few CTAs (blocks of threads), so that kernels of both ranks, which wait for each other, fit on the GPU at once.
_ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


@dataclass(frozen=True)
class Way:
    """How two ranks meet.

    Attributes:
        words: the devices and the backend, for a title.
        backend: the backend of their group.
        environment: variables that they need.
        missing: why they can't meet; None if they can.
    """

    words: str
    backend: str
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def way(device: str) -> Way:
    """The way on this machine's ``cuda`` or ``cpu``. On GPUs each rank has one, or both share one where this NCCL can
    do that. On the CPU they meet over gloo, which shows that a measurement runs."""
    if device == "cpu":
        return Way("CPU, over gloo", "gloo")
    if not dist.is_nccl_available():
        return Way("GPU", "nccl", missing="this torch has no NCCL")
    version = torch.cuda.nccl.version()
    over = f"{torch.cuda.get_device_name()}, over NCCL {'.'.join(map(str, version[:3]))}"
    if torch.cuda.device_count() >= RANKS:
        return Way(f"{RANKS} x {over}", "nccl")
    if version[:2] >= _CAN_SHARE:
        return Way(f"one {over}", "nccl", _ON_ONE_GPU)
    return Way(f"one {over}", "nccl", missing=f"one GPU, which {RANKS} ranks can share from NCCL 2.30 on")


def device_of_rank(device: str) -> torch.device:
    """This rank's, inside :func:`tools.bench.processes.run`."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
