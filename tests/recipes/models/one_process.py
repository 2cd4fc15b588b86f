"""A model under a strategy beside one process: three updates in float64."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_parallel as lp
from tests.strategies.harness import complete, here

EXACT = 1e-12  # float64
STRATEGIES: dict[str, Any] = {
    "single": lambda: "auto",
    "pipeline": lambda: lp.PipelineStrategy(microbatches=4),
    "zbv": lambda: lp.PipelineStrategy(microbatches=4, schedule="zbv"),
    "async": lambda: lp.AsyncPipelineStrategy(microbatches=2),
    "tensor": lambda: lp.TensorParallelStrategy(),
    "both": lambda: lp.PipelineStrategy(microbatches=2, tensor_parallel=2, stages=2),
    "fsdp": lambda: lp.FullyShardedStrategy(),
}


def fitted(strategy: str, ranks: int, module: L.LightningModule, batches: DataLoader[Any]) -> dict[str, Any]:
    """What this rank has after an epoch."""
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=STRATEGIES[strategy](), precision="64-true", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, batches)
    shards = trainer.strategy.local_model.shards if strategy != "single" else {}  # type: ignore[attr-defined]
    return {
        "loss": float(trainer.callback_metrics["train_loss"]),
        "weights": {name: complete(p.detach()) for name, p in here(module).items()},
        "shards": shards,
        "trained": {name for name, p in here(module).items() if p.requires_grad},
    }


def assert_equal(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert ranks[0]["loss"] == pytest.approx(reference["loss"], rel=0, abs=EXACT)
    seen: set[str] = set()
    for rank in ranks:
        for name, value in rank["weights"].items():
            expected = reference["weights"][name]
            expected = rank["shards"][name].take(expected) if name in rank["shards"] else expected
            assert torch.allclose(value, expected, rtol=0, atol=EXACT), name
            seen.add(name)
    assert seen == reference["weights"].keys()
