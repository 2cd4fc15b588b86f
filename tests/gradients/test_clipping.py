"""Clipped shards, parts and copies are what torch makes of the whole model's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.gradients.clipping import square_of_norm
from tests.strategies.harness import joined, largest_difference, train
from tools.workers.pool import WorkerPool

CPU = torch.device("cpu")


def test_a_norm_is_not_rounded_to_the_gradients_dtype() -> None:
    """Else it would depend on how gradients are grouped: 16.0935 would be 16.125."""
    assert square_of_norm([torch.ones(259, dtype=torch.bfloat16)], CPU) == pytest.approx(259)


def test_fully_sharded_stages_are_clipped_by_value_as_one_process(pool: WorkerPool) -> None:
    clipping: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value", "max_steps": 1}
    options = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    # Loose parameters are in no layer, so they stay whole: torch takes such a mix one by one only.
    reports = pool.run(train, 4, "Blocks", "sync", options, init=False, batch_size=4, **clipping)
    whole = pool.run(train, 1, "Blocks", init=False, **clipping)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < 1e-12
