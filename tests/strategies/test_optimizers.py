"""Optimizers that aren't elementwise: refused before training where a rank sees a part of what they treat as one, and
with the numbers of one process elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.equality import EXACT
from tests.strategies.failures import LIMIT, assert_refused
from tests.strategies.harness import Report, joined, largest_difference, make_trainer, train
from tests.strategies.models import BATCH, Base, Blocks
from tests.strategies.shardable import Mixed
from tests.strategies.test_fully_sharded import SAMPLES
from tests.thorough import thorough
from tools.optimizer_table import optimizers
from tools.workers.pool import WorkerPool


def by(kind: str, model: type[Base]) -> type[Base]:
    """A model with another optimizer."""

    def configure_optimizers(self: Base) -> Any:
        parameters = [p for p in self.parameters() if kind != "Muon" or p.ndim == 2]
        return getattr(optimizers if hasattr(optimizers, kind) else torch.optim, kind)(parameters)

    return type(model.__name__, (model,), {"configure_optimizers": configure_optimizers})


def fit(kind: str, strategy: str, options: dict[str, Any]) -> None:
    make_trainer(strategy, [], options).fit(by(kind, Mixed)(), Mixed.loader())


@pytest.mark.parametrize(("kind", "ranks", "strategy", "options", "words"), [
    ("Prodigy", 2, "tensor", {}, ["TensorParallelStrategy", "tensor_parallel=2", "AdamW"]),
    ("Prodigy", 4, "sync", {"stages": 1, "tensor_parallel": 2, "data_parallel_kind": "fully_shard"}, ["divide"]),
    ("Prodigy", 2, "sync", {}, ["PipelineStrategy", "2 stages", "AdamW"]),
    ("SavesMore", 2, "tensor", {}, ["'base', 'steps'", "optimizer.state"]),
    ("DividesItsWork", 2, "tensor", {}, ["TensorParallelStrategy", "allgather", "single process", "Muon"]),
    ("DividesItsWork", 2, "fsdp", {}, ["FullyShardedStrategy", "allgather", "single process", "Muon"]),
    ("KeepsIds", 2, "tensor", {}, ["keeps", "'kept'", "TensorParallelStrategy", "parameter group"]),
    ("KeepsParameters", 2, "fsdp", {}, ["keeps", "'kept'", "FullyShardedStrategy", "parameter group"]),
    ("KeepsParameters", 2, "sync", {}, ["keeps", "'kept'", "PipelineStrategy", "parameter group"]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_would_train_another_model_is_refused_before_training(
    pool: WorkerPool, kind: str, ranks: int, strategy: str, options: dict[str, Any], words: list[str]
) -> None:
    if strategy in ("sync", "async"):
        options = {"microbatches": 2, **options}
    failures = pool.run(fit, ranks, kind, strategy, options, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused(failures, "ValueError", [kind, *words])


def train_by(kind: str, *args: Any, **kwargs: Any) -> Report:
    return train(by(kind, Blocks), *args, **kwargs)


@pytest.mark.parametrize("kind", ["HostLAMB", *thorough("LAMB")])
def test_where_it_trains_the_same_model_it_trains_as_in_one_process(pool: WorkerPool, kind: str) -> None:
    (single,) = pool.run(train_by, 1, kind, init=False, samples=SAMPLES[2])
    stages = pool.run(train_by, 2, kind, "sync", {"microbatches": 2}, init=False, samples=SAMPLES[2])
    # These compute with whole parameters: their norms are those of DTensors.
    sharded = pool.run(train_by, 2, kind, "fsdp", init=False, samples=SAMPLES[2], batch_size=BATCH // 2)
    for reports in (stages, sharded):
        assert largest_difference(joined(reports, "weights"), single.weights) < EXACT
