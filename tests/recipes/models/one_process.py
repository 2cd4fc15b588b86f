"""A model under a strategy beside one process: three updates in float64."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from tests.strategies.equality import EXACT
from tests.strategies.harness import Report, collect, joined, largest_difference, make_trainer

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "pipeline": ("sync", {"microbatches": 4}),
    "zbv": ("sync", {"microbatches": 4, "schedule": "zbv"}),
    "async": ("async", {"microbatches": 2}),
    "tensor": ("tensor", {}),
    "both": ("sync", {"microbatches": 2, "tensor_parallel": 2, "stages": 2}),
    "fsdp": ("fsdp", {}),
}


def fitted(strategy: str, module: L.LightningModule, batches: DataLoader[Any]) -> Report:
    """What this rank has after an epoch."""
    name, options = STRATEGIES[strategy]
    given = {"max_epochs": 1, "precision": "64-true", "use_distributed_sampler": False}
    trainer = make_trainer(name, [], options, **given)
    trainer.fit(module, batches)
    return collect(Report(), trainer, module)


def assert_equal(ranks: list[Report], reference: Report) -> None:
    assert ranks[0].metrics["train_loss"] == pytest.approx(reference.metrics["train_loss"], rel=0, abs=EXACT)
    assert largest_difference(joined(ranks, "weights"), reference.weights) < EXACT
