"""Optimizers that aren't elementwise are refused before training where a rank sees a part of what they treat as one.
Those that train are in test_owners.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.failures import LIMIT, assert_refused
from tests.strategies.harness import make_trainer
from tests.strategies.shardable import Mixed
from tools.optimizer_table import optimizers
from tools.workers.pool import WorkerPool


def fit(kind: str, strategy: str, options: dict[str, Any]) -> None:
    class Optimized(Mixed):
        def configure_optimizers(self) -> Any:
            return getattr(optimizers, kind)(self.parameters())

    make_trainer(strategy, [], options).fit(Optimized(), Mixed.loader())


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
