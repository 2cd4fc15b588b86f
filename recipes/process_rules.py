"""Rules about the processes of a run: how many there are, who has started them, and what this machine bears."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.launchers.kubernetes import KubernetesLauncher
from recipes.launchers.local import LocalLauncher
from recipes.launchers.slurm import SlurmLauncher, is_here, unfinished_job
from recipes.launchers.torchrun import TorchrunLauncher
from recipes.problem import NOT_KNOWN, Problem
from recipes.processes import joined, missing
from recipes.schema import kind_of, world_size

Config = Mapping[str, Any]

_GPU = ("gpu", "cuda")  # values of trainer.accelerator
_ALWAYS, _PER_CORE = 8, 4  # processes
_WORKER_MIB = 250  # of memory that a worker takes before its model


def counted(config: Config) -> str:
    """The processes of a run, as the config has them."""
    devices, nodes = f"cluster.devices={config['cluster']['devices']}", config["cluster"].get("nodes", 1)
    return devices if nodes == 1 else f"cluster.nodes={nodes} x {devices}"


def restarts_by_itself(config: Config) -> bool:
    """May the engine start the run again without being told to?"""
    kind = kind_of("cluster", config["cluster"])
    return kind is KubernetesLauncher or (kind is SlurmLauncher and config["cluster"]["requeue"])


def _restarts_elsewhere(config: Config) -> Iterator[Problem]:
    kind, most = kind_of("cluster", config["cluster"]), config["cluster"].get("max_restarts", 0)
    others = {TorchrunLauncher: "torchrun's --max-restarts", KubernetesLauncher: "the runtime's backoffLimit"}
    if most and kind in others:
        yield Problem("cluster.max_restarts", most, "this cluster counts restarts itself", f"use {others[kind]}")


def _one_machine(config: Config) -> Iterator[Problem]:
    if kind_of("cluster", config["cluster"]) is LocalLauncher and config["cluster"]["nodes"] > 1:
        fix = "use cluster=torchrun or another cluster of several machines, or cluster.nodes=1"
        yield Problem("cluster.nodes", config["cluster"]["nodes"], "cluster=local is this machine alone", fix)


def _started_already(config: Config) -> Iterator[Problem]:
    """By torchrun, or something like it. Then nothing else may start them."""
    there = joined()
    if not config["launch"]:
        return
    if kind_of("cluster", config["cluster"]) is not TorchrunLauncher:
        if there > 1:
            message = f"this is one of {there} processes that have been started, and each would start workers"
            yield Problem("cluster._target_", config["cluster"]["_target_"], message, "use cluster=torchrun")
    elif there == 0:
        fix = "start it with torchrun --nproc-per-node=NUMBER -m recipes.train, or use cluster=local"
        yield Problem("cluster", "torchrun", "nothing has started processes for it", fix)
    elif missing():
        fix = "set them for each process, as torchrun does"
        yield Problem("cluster", "torchrun", f"{', '.join(missing())} not in the environment", fix)
    elif there != world_size(config):
        message = f"{counted(config)} is for {world_size(config)} processes, but {there} have been started"
        yield Problem("cluster", "torchrun", message, f"start {world_size(config)}, or change cluster.devices")


def _slurm_is_here(config: Config) -> Iterator[Problem]:
    cluster = config["cluster"]
    submits = kind_of("cluster", cluster) is SlurmLauncher and config["launch"] and cluster["submit"] is True
    if submits and not is_here():
        fix = "run this on a machine that has it, or use cluster.submit=print"
        yield Problem("cluster", "slurm", "there is no sbatch on this machine", fix)


def _runs_already(config: Config) -> Iterator[Problem]:
    """A second job would write over the first one's checkpoints."""
    cluster, folder = config["cluster"], config["paths"]["output_dir"]
    if kind_of("cluster", cluster) is SlurmLauncher and config["launch"] and folder != NOT_KNOWN:
        job = unfinished_job(Path(folder))
        if job is not None:
            yield Problem("hydra.run.dir", folder, f"has a run that goes on: {job}", "wait for it, or scancel it")


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


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _one_machine,
    _restarts_elsewhere,
    _started_already,
    _slurm_is_here,
    _runs_already,
    _enough_cores,
    _has_gpu,
    _backend,
)
