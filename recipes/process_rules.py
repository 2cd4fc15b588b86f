"""Rules about where a run is to be: its processes, who has started them, what this machine bears, and the packages that
are installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from recipes import IN_CHECKOUT
from recipes.examples import example_of
from recipes.launchers.kubernetes import KubernetesLauncher
from recipes.launchers.local import LocalLauncher
from recipes.launchers.ray import RayLauncher
from recipes.launchers.slurm import SlurmLauncher, is_here, unfinished_job
from recipes.launchers.torchrun import TorchrunLauncher
from recipes.problem import NOT_KNOWN, Problem
from recipes.processes import joined, missing
from recipes.schema import kind_of, world_size

_GPU = ("gpu", "cuda")  # values of trainer.accelerator
_ALWAYS, _PER_CORE = 8, 4  # processes
_WORKER_MIB = 250  # of memory that a worker takes before its model
Config = Mapping[str, Any]

# By group and example: the extra, and the modules with the names of their packages.
_EXAMPLES: Mapping[tuple[str, str], tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        ("model", "hf"): ("hf", {"transformers": "transformers", "safetensors": "safetensors"}),
        ("model", "timm"): ("images", {"timm": "timm", "torchvision": "torchvision"}),
        ("data", "hf"): ("hf", {"datasets": "datasets"}),
        ("data", "images"): ("images", {"PIL": "pillow"}),
    }
)
# By the logger.
_TRACKERS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "recipes.trackers.ContinuedWandbLogger": ("wandb", {"wandb": "wandb"}),
        "recipes.trackers.ContinuedMLFlowLogger": ("mlflow", {"mlflow": "mlflow-skinny"}),
    }
)


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


def _mounts_in_a_container(config: Config) -> Iterator[Problem]:
    cluster = config["cluster"]
    if kind_of("cluster", cluster) is not SlurmLauncher:
        return
    if cluster["container"] is None:
        fix = "name its image with cluster.container, or leave them out"
        if cluster["mounts"]:
            yield Problem("cluster.mounts", cluster["mounts"], "there is no container that gets them", fix)
        return
    if any("," in mount for mount in cluster["mounts"]):
        fix = "give each mount as an item of the list, and rename folders that have a comma"
        yield Problem("cluster.mounts", cluster["mounts"], "a comma separates mounts", fix)


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
    if config["strategy"].get("process_group_backend") != "nccl":
        return
    gpus = torch.cuda.device_count() if _runs_here(config) else world_size(config)
    if config["trainer"]["accelerator"] == "cpu" or gpus < world_size(config):
        message = f"NCCL needs a GPU for each of {world_size(config)} processes"
        yield Problem("strategy.process_group_backend", "nccl", message, "use gloo, or null, or fewer devices")


def _missing(path: str, value: Any, extra: str, packages: Mapping[str, str]) -> Iterator[Problem]:
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        fix = f'pip install ".[recipes,{extra}]"' + " in the checkout" * (not IN_CHECKOUT)
        yield Problem(path, value, f"{' and '.join(missing)} not installed", fix)


def _of_examples(config: Config) -> Iterator[Problem]:
    for (group, name), needed in _EXAMPLES.items():
        if example_of(config[group]) == name:
            yield from _missing(f"{group}.name", name, *needed)


def _of_adapters(config: Config) -> Iterator[Problem]:
    if example_of(config["model"]) == "hf" and config["model"]["lora"] is not None:
        yield from _missing("model.name", "hf", "hf", {"peft": "peft"})


def _of_cluster(config: Config) -> Iterator[Problem]:
    if kind_of("cluster", config["cluster"]) is RayLauncher and config["launch"]:
        yield from _missing("cluster", "ray", "ray", {"ray": "ray"})


def _of_loggers(config: Config) -> Iterator[Problem]:
    for key, node in config["logger"].items():
        target = node["_target_"] if node is not None else ""
        if target in _TRACKERS:
            yield from _missing(f"logger.{key}._target_", target, *_TRACKERS[target])


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _one_machine,
    _restarts_elsewhere,
    _started_already,
    _slurm_is_here,
    _mounts_in_a_container,
    _runs_already,
    _enough_cores,
    _has_gpu,
    _backend,
    # Each by itself: where a value that one looks at is broken, the others are still told.
    _of_examples,
    _of_adapters,
    _of_cluster,
    _of_loggers,
)
