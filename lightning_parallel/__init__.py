"""Lightning strategies that train an unmodified LightningModule on any layout of pipeline, tensor and data parallelism.

Importing the package makes its strategies' names known to Lightning: ``Trainer(strategy="pipeline_async")``. From then
on Lightning's own strategies, and ``MyModule.load_from_checkpoint``, open checkpoints that are directories.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel.callbacks.exact_resume import ExactResume
from lightning_parallel.callbacks.finite_loss import FiniteLoss
from lightning_parallel.callbacks.performance_monitor import PerformanceMonitor
from lightning_parallel.callbacks.preemption import Preemption
from lightning_parallel.callbacks.replica_guard import ReplicaGuard
from lightning_parallel.callbacks.resumable_loader import ResumableDataLoader
from lightning_parallel.checkpoint import is_checkpoint, read_plain
from lightning_parallel.checkpoint.directory import replacing
from lightning_parallel.comparison.check import check
from lightning_parallel.planning.planner import plan
from lightning_parallel.private.lightning.checkpoints import open_directories
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.fully_sharded import FullyShardedStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.pipeline_async import AsyncPipelineStrategy
from lightning_parallel.strategies.tensor import TensorParallelStrategy
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "AsyncPipelineStrategy",
    "ColumnParallelLinear",
    "DataParallelStrategy",
    "ExactResume",
    "FiniteLoss",
    "FullyShardedStrategy",
    "PerformanceMonitor",
    "PipelineStrategy",
    "Preemption",
    "ReplicaGuard",
    "ResumableDataLoader",
    "RowParallelLinear",
    "TensorParallelStrategy",
    "VocabParallelEmbedding",
    "check",
    "plan",
]

__version__ = "0.1.0"


def _register() -> None:
    names: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
        "pipeline_naive": (PipelineStrategy, {"schedule": "naive"}),
        "pipeline_gpipe": (PipelineStrategy, {"schedule": "gpipe"}),
        "pipeline_1f1b": (PipelineStrategy, {"schedule": "1f1b"}),
        "pipeline_interleaved": (PipelineStrategy, {"schedule": "interleaved"}),
        "pipeline_zbv": (PipelineStrategy, {"schedule": "zbv"}),
        "pipeline_vhalf": (PipelineStrategy, {"schedule": "vhalf"}),
        "pipeline_vmin": (PipelineStrategy, {"schedule": "vmin"}),
        "pipeline_async": (AsyncPipelineStrategy, {}),
        "pipeline_tensor": (PipelineStrategy, {"tensor_parallel": 2}),
        "pipeline_3d": (PipelineStrategy, {"tensor_parallel": 2, "data_parallel": 2}),
        "data_parallel": (DataParallelStrategy, {}),
        "tensor_parallel": (TensorParallelStrategy, {}),
        "fully_sharded": (FullyShardedStrategy, {}),
    }
    for name, (strategy, options) in names.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=(strategy.__doc__ or "").split("\n")[0], **options)


_register()
open_directories(is_checkpoint, read_plain, replacing)
