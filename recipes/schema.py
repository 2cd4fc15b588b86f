"""Types and limits of every value in conf/: one dataclass per kind of node, read by :mod:`recipes.validate`.

A node of a class that is not known here (a user's own ``_target_``) is left to that class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of a number, both included."""

    low: float | None = None
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"of at least {self.low:g}"
        return f"from {self.low:g} to {self.high:g}" if self.low is not None else f"of at most {self.high:g}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Auto = Literal["auto"]


@dataclass
class Run:
    """The top level."""

    task_name: str
    tags: list[str]
    seed: Natural
    test: bool
    ckpt_path: str | None
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


# ------------------------------------------------------------ model, data


@dataclass
class GPT:
    name: Literal["gpt"]
    vocab_size: Annotated[int, Range(2)]
    context: Count
    layers: Count
    heads: Count
    width: Count
    dropout: Share
    tie_embeddings: bool


@dataclass
class MLP:
    name: Literal["mlp"]
    features: Count
    classes: Annotated[int, Range(2)]
    width: Count
    layers: Count
    dropout: Share


@dataclass
class LeNet:
    name: Literal["lenet"]
    channels: Count
    size: Annotated[int, Range(4)]
    classes: Annotated[int, Range(2)]


@dataclass
class Stdlib:
    name: Literal["stdlib"]
    directory: str
    context: Count
    val_windows: Count | None
    batch_size: Count
    workers: Natural


@dataclass
class Text:
    name: Literal["text"]
    path: str | None
    context: Count
    val_windows: Count | None
    batch_size: Count
    workers: Natural


@dataclass
class Digits:
    name: Literal["digits"]
    batch_size: Count
    workers: Natural


# ------------------------------------------------------------ strategy


@dataclass
class Single:
    _target_: None


@dataclass
class DDP:
    _target_: str
    bucket_cap_mb: Annotated[float, Range(0)]
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    timeout: dict[str, Any]
    process_group_backend: str | None


@dataclass
class DataParallel:
    _target_: str
    loss_on: Literal["replicas", "output_device"]


@dataclass
class FullySharded:
    _target_: str
    data_parallel: Count | Auto
    reshard_after_forward: bool
    cpu_offload: bool
    units: list[str] | None
    process_group_backend: str | None


@dataclass
class TensorParallel:
    _target_: str
    data_parallel: Count | Auto
    tensor_parallel: Count | Auto
    plan: dict[str, str] | None
    sequence_parallel: bool
    process_group_backend: str | None


@dataclass
class Pipeline:
    _target_: str
    stages: Count | Auto
    schedule: Literal["naive", "gpipe", "1f1b"]
    microbatches: Count | Auto
    layers: list[str] | None
    balance: Literal["parameters", "layers"] | list[Count]
    activation_checkpointing: bool
    data_parallel: Count | Auto
    data_parallel_kind: Literal["replicate", "shard"]
    tensor_parallel: Count | Auto
    plan: dict[str, str] | None
    sequence_parallel: bool
    timeline: bool
    process_group_backend: str | None


@dataclass
class AsyncPipeline:
    _target_: str
    stages: Count | Auto
    microbatches: Count | Auto
    weights: Literal["stash", "2bw", "latest"]
    correction: Literal["error_feedback", "second_order"] | NotNegative | None
    lr_discount: Count | None
    layers: list[str] | None
    balance: Literal["parameters", "layers"] | list[Count]
    activation_checkpointing: bool
    extra_in_flight: Natural
    data_parallel: Count | Auto
    tensor_parallel: Count | Auto
    plan: dict[str, str] | None
    sequence_parallel: bool
    timeline: bool
    process_group_backend: str | None


# ------------------------------------------------------------ optimizer, schedule


@dataclass
class Adam:
    _target_: str
    lr: NotNegative
    betas: list[Share]
    weight_decay: NotNegative
    eps: NotNegative = 1e-8
    amsgrad: bool = False
    foreach: bool | None = None
    fused: bool | None = None


@dataclass
class NAdam:
    _target_: str
    lr: NotNegative
    betas: list[Share]
    weight_decay: NotNegative
    decoupled_weight_decay: bool
    momentum_decay: NotNegative
    eps: NotNegative = 1e-8
    foreach: bool | None = None


@dataclass
class Muon:
    _target_: str
    lr: NotNegative
    betas: list[Share]
    weight_decay: NotNegative
    momentum: Share


@dataclass
class SGD:
    _target_: str
    lr: NotNegative
    momentum: NotNegative
    weight_decay: NotNegative
    nesterov: bool
    dampening: NotNegative = 0.0
    foreach: bool | None = None
    fused: bool | None = None


@dataclass
class Constant:
    name: Literal["constant"]
    warmup_steps: Natural


@dataclass
class Cosine:
    name: Literal["cosine"]
    warmup_steps: Natural
    total_steps: int
    floor: Share


# ------------------------------------------------------------ trainer, cluster, paths

Limit = Natural | Share | None


@dataclass
class Trainer:
    """Arguments of ``lightning.Trainer``, but for ``TRAINER_SET_ELSEWHERE``."""

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
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    max_time: str | dict[str, int] | None = None
    min_steps: Natural | None = None
    min_epochs: Natural | None = None
    overfit_batches: int | float = 0.0
    sync_batchnorm: bool = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    fast_dev_run: bool | int = False
    profiler: str | None = None
    inference_mode: bool = True


TRAINER_SET_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "devices": "cluster.devices",
        "num_nodes": "torchrun's --nnodes",
        "strategy": "the group strategy=...",
        "logger": "the group logger=...",
        "callbacks": "the group callbacks=...",
        "default_root_dir": "paths.output_dir",
        "enable_checkpointing": "the group callbacks=...",
        "use_distributed_sampler": "nothing: the example data shard themselves",
        "check_val_every_n_epoch": "trainer.val_check_interval",
    }
)


@dataclass
class Cluster:
    devices: Count
    threads: Count


@dataclass
class Paths:
    data_dir: str
    log_dir: str
    output_dir: str


# Which dataclass a node has: by its `name`, by its `_target_`, or by the group.
BY_NAME: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "model": {"gpt": GPT, "mlp": MLP, "lenet": LeNet},
        "data": {"stdlib": Stdlib, "text": Text, "digits": Digits},
        "scheduler": {"constant": Constant, "cosine": Cosine},
    }
)
BY_TARGET: Mapping[str | None, type] = MappingProxyType(
    {
        None: Single,
        "lightning.pytorch.strategies.DDPStrategy": DDP,
        "lightning_parallel.DataParallelStrategy": DataParallel,
        "lightning_parallel.FullyShardedStrategy": FullySharded,
        "lightning_parallel.TensorParallelStrategy": TensorParallel,
        "lightning_parallel.PipelineStrategy": Pipeline,
        "lightning_parallel.AsyncPipelineStrategy": AsyncPipeline,
        "torch.optim.Adam": Adam,
        "torch.optim.AdamW": Adam,
        "torch.optim.NAdam": NAdam,
        "torch.optim.SGD": SGD,
        "recipes.models.muon.MuonAdamW": Muon,
    }
)
BY_GROUP: Mapping[str, type] = MappingProxyType({"trainer": Trainer, "cluster": Cluster, "paths": Paths})

# What example models take and example data give.
TAKES: Mapping[str, str] = MappingProxyType({"gpt": "tokens", "mlp": "images", "lenet": "images"})
GIVES: Mapping[str, str] = MappingProxyType({"stdlib": "tokens", "text": "tokens", "digits": "images"})
