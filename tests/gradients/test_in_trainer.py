"""gradients/in_trainer.py: ``gradient_clip_val`` clips by the whole model's gradient, whatever part a rank holds."""

from __future__ import annotations

from typing import Any

from tests.pool import WorkerPool
from tests.strategies.harness import joined, largest_difference, train


def test_fully_sharded_stages_are_clipped_by_value_as_one_process(pool: WorkerPool) -> None:
    clipping: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    options = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    reports = pool.run(train, 4, "Llama", "sync", options, init=False, batch_size=4, **clipping)
    whole = pool.run(train, 2, "Llama", "sync", {"microbatches": 4}, init=False, **clipping)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < 1e-12
