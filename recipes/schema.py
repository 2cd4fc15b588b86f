"""Types and limits of every value in conf/: a dataclass for each kind of node, read by :mod:`recipes.validate`.

The settings of this package's strategies are declared in the package itself, those of clusters by their launchers,
those of the example models and data in ``examples.py``. A node of a class that isn't known here (a user's own
``_target_``) is left to that class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, Any, Literal

from hydra.utils import get_class

from lightning_parallel.set_up.options import Seconds
from lightning_parallel.settings import Auto, Bytes, Count, Natural, NotNegative, Range
from lightning_parallel.strategies.data_parallel import DataParallelOptions
from lightning_parallel.strategies.fully_sharded import FullyShardedOptions
from lightning_parallel.strategies.pipeline import PipelineOptions
from lightning_parallel.strategies.pipeline_async import AsyncPipelineOptions
from lightning_parallel.strategies.tensor import TensorParallelOptions
from recipes import examples
from recipes.examples import Fraction


@dataclass
class Run:
    """The top level."""

    task_name: str
    tags: list[str]
    seed: Natural
    test: bool
    ckpt_path: str | None
    resume: Auto | None
    init_from: str | None
    on_nan: Literal["stop", "warn"]
    timeline: bool
    optimized_metric: str | None
    print_config: bool
    launch: bool
    model: dict[str, Any]
    data: dict[str, Any]
    strategy: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    trainer: dict[str, Any]
    cluster: dict[str, Any]
    logger: dict[str, Any]
    callbacks: dict[str, Any]
    paths: dict[str, Any]
    command: Literal["train", "check", "plan", "evaluate", "generate"] = "train"  # set by the commands
    compile: bool = False
    as_pytorch_lightning: bool = False  # packages that import pytorch_lightning get lightning.pytorch
    generation: dict[str, Any] | None = None  # how text is generated
    plan: dict[str, Any] | None = None  # for what a layout is planned


# -- strategy --------------------------------------------------------------------------------------------------------


@dataclass
class Single:
    """One process: nothing to set."""


@dataclass
class DDP:
    bucket_cap_mb: NotNegative
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    timeout: Seconds | timedelta
    process_group_backend: Literal["gloo", "nccl"] | None


# -- optimizer, schedule ---------------------------------------------------------------------------------------------


@dataclass
class Adam:
    lr: NotNegative
    betas: list[Fraction]
    weight_decay: NotNegative
    eps: NotNegative = 1e-8
    amsgrad: bool = False
    foreach: bool | None = None
    fused: bool | None = None


@dataclass
class NAdam:
    lr: NotNegative
    betas: list[Fraction]
    weight_decay: NotNegative
    decoupled_weight_decay: bool
    momentum_decay: NotNegative
    eps: NotNegative = 1e-8
    foreach: bool | None = None


@dataclass
class Muon:
    lr: NotNegative
    betas: list[Fraction]
    weight_decay: NotNegative
    momentum: Fraction


@dataclass
class SGD:
    lr: NotNegative
    momentum: NotNegative
    weight_decay: NotNegative
    nesterov: bool
    dampening: NotNegative = 0.0
    foreach: bool | None = None
    fused: bool | None = None


@dataclass
class Constant:
    warmup_steps: Natural


@dataclass
class Cosine:
    warmup_steps: Natural
    total_steps: int
    floor: Fraction


# -- trainer, paths --------------------------------------------------------------------------------------------------

Limit = Natural | Fraction | None


@dataclass
class Trainer:
    """Arguments of ``lightning.Trainer``, which checks the others itself, but for ``TRAINER_SET_ELSEWHERE``."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]
    max_steps: Annotated[int, Range(-1)]
    max_epochs: Annotated[int, Range(-1)] | None
    val_check_interval: Count | Auto
    accumulate_grad_batches: Count
    gradient_clip_val: NotNegative | None
    log_every_n_steps: Count
    limit_train_batches: Limit
    limit_val_batches: Limit
    limit_test_batches: Limit
    num_sanity_val_steps: Annotated[int, Range(-1)]
    deterministic: bool | Literal["warn"] | None
    enable_progress_bar: bool
    enable_model_summary: bool
    plugins: list[dict[str, Any]] | None = None  # each with a _target_


TRAINER_SET_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "devices": "cluster.devices",
        "num_nodes": "cluster.nodes",
        "strategy": "the group strategy=...",
        "logger": "the group logger=...",
        "callbacks": "the group callbacks=...",
        "default_root_dir": "paths.output_dir",
        "enable_checkpointing": "the group callbacks=...",
        "check_val_every_n_epoch": "trainer.val_check_interval",
        "barebones": "logger=none callbacks=none",
    }
)


@dataclass
class Paths:
    data_dir: str
    log_dir: str
    output_dir: str


@dataclass
class Plan:
    devices: Count | None
    memory: Bytes | None
    device: Literal["here", "a100", "h100", "h200", "l4"]
    measure: Natural


# Which dataclass a node has: by its `name`, by its `_target_`, or by its group.
BY_NAME: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "model": {name: each.settings for name, each in examples.MODELS.items()},
        "data": {name: each.settings for name, each in examples.DATA.items()},
        "scheduler": {"constant": Constant, "cosine": Cosine},
    }
)
_CLUSTERS = ("Kubernetes", "Local", "Ray", "Slurm", "Torchrun")
_LAUNCHERS = [f"recipes.launchers.{name.lower()}.{name}Launcher" for name in _CLUSTERS]
BY_TARGET: Mapping[str, Mapping[str | None, type | str]] = MappingProxyType(
    {
        "strategy": {
            None: Single,
            "lightning.pytorch.strategies.DDPStrategy": DDP,
            "lightning_parallel.DataParallelStrategy": DataParallelOptions,
            "lightning_parallel.FullyShardedStrategy": FullyShardedOptions,
            "lightning_parallel.TensorParallelStrategy": TensorParallelOptions,
            "lightning_parallel.PipelineStrategy": PipelineOptions,
            "lightning_parallel.AsyncPipelineStrategy": AsyncPipelineOptions,
        },
        "optimizer": {
            "torch.optim.AdamW": Adam,
            "torch.optim.Adam": Adam,
            "torch.optim.NAdam": NAdam,
            "torch.optim.SGD": SGD,
            "recipes.models.muon.MuonAdamW": Muon,
        },
        "cluster": {name: name for name in _LAUNCHERS},  # launchers start what trains, which imports this module
    }
)
BY_GROUP: Mapping[str, type] = MappingProxyType({"trainer": Trainer, "paths": Paths, "plan": Plan})


def kind_of(group: str, node: Mapping[str, Any]) -> type | None:
    """The dataclass that describes the node of a group; None where only the node's own class knows."""
    target = node.get("_target_")
    if group in BY_GROUP:
        return BY_GROUP[group]
    if group in BY_NAME and target is None:
        return BY_NAME[group].get(node.get("name", ""))
    found = BY_TARGET.get(group, {}).get(target)
    return get_class(found) if isinstance(found, str) else found


def world_size(config: Mapping[str, Any]) -> int:
    """The processes of a run: one for strategy=single and data_parallel, else one for each device of each machine."""
    in_one_process = (Single, DataParallelOptions)
    if kind_of("strategy", config["strategy"]) in in_one_process:
        return 1
    return int(config["cluster"].get("nodes", 1)) * int(config["cluster"]["devices"])
