"""Rules about this machine: what a run asks of it, told before its processes start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from recipes.launchers.local import LocalLauncher
from recipes.problem import Problem
from recipes.schema import kind_of, world_size

Config = Mapping[str, Any]

_GPU = ("gpu", "cuda")  # values of trainer.accelerator
_ALWAYS, _PER_CORE = 8, 4  # processes
_WORKER_MIB = 250  # of memory that a worker takes before its model


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """As many as still make sense on this machine: to try a layout out, several share a core."""
    return max(_ALWAYS, _PER_CORE * cores(), torch.cuda.device_count())


def _runs_here(config: Config) -> bool:
    return bool(config["launch"]) and kind_of("cluster", config["cluster"]) is LocalLauncher


def _enough_cores(config: Config) -> Iterator[Problem]:
    if not _runs_here(config) or config["cluster"].get("oversubscribe"):
        return
    processes, most = world_size(config), most_processes()
    if processes > most:
        gib = processes * _WORKER_MIB / 1024
        message = f"too many processes for {cores()} cores; before its model each takes {_WORKER_MIB} MiB of memory, "
        fix = f"use at most {most}, or cluster.oversubscribe=true to start them anyway"
        yield Problem("cluster.devices", processes, f"{message}together {gib:.0f} GiB", fix)


def _has_gpu(config: Config) -> Iterator[Problem]:
    accelerator = config["trainer"]["accelerator"]
    if accelerator in _GPU and _runs_here(config) and torch.cuda.device_count() == 0:
        yield Problem("trainer.accelerator", accelerator, "this machine has no GPU", "use cpu, or auto")


def _backend(config: Config) -> Iterator[Problem]:
    """NCCL joins processes that have a GPU each."""
    backend = config["strategy"].get("process_group_backend")
    if backend != "nccl":
        return
    path, fix = "strategy.process_group_backend", "use gloo, or null"
    if config["trainer"]["accelerator"] == "cpu":
        yield Problem(path, backend, "NCCL is for GPUs, but trainer.accelerator=cpu", fix)
    elif _runs_here(config):
        processes, gpus = world_size(config), torch.cuda.device_count()
        if gpus == 0:
            yield Problem(path, backend, "NCCL is for GPUs, and this machine has none", fix)
        elif gpus < processes:
            message = f"NCCL needs a GPU for each of cluster.devices={processes}, and this machine has {gpus}"
            yield Problem(path, backend, message, f"{fix}, or cluster.devices={gpus}")


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (_enough_cores, _has_gpu, _backend)
