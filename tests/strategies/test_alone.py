"""Ranks that are alone along an axis send nothing along it: over NCCL a group of one rank would be connected too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.comparison.check import layout_of
from lightning_parallel.comparison.runs import trainer_of
from tools.workers.pool import WorkerPool

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "broadcast_object_list", "all_gather_object", "gather_object", "barrier",
)  # fmt: skip


class Layers(L.LightningModule):
    """Trained, validated and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def collectives_of_one(strategy: str, options: dict[str, Any]) -> list[str]:
    """Those that a fit on two ranks calls in a group of one rank."""
    found: list[str] = []

    def noting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            group = next((x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)), None)
            found.extend([name] if dist.get_world_size(group) == 1 else [])
            return collective(*args, **kwargs)

        return noted

    loaders = [DataLoader(torch.randn(16, 8), batch_size=8) for _ in range(2)]
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(patch.object(dist, name, noting(name, getattr(dist, name))))
        known = layout_of(strategy, options, 2)
        trainer_of(strategy=known, devices=2, accelerator="cpu", gradient_clip_val=1.0).fit(Layers(), *loaders)
    return found


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("pipeline_1f1b", {"stages": 2}),
        ("pipeline_1f1b", {"stages": 1, "data_parallel": 2}),
        ("pipeline_async", {"stages": 2}),
        ("tensor_parallel", {"tensor_parallel": 2}),
        ("tensor_parallel", {"tensor_parallel": 1, "data_parallel": 2}),
        ("fully_sharded", {}),
    ],
    ids=str,
)
def test_a_rank_alone_sends_nothing(pool: WorkerPool, strategy: str, options: dict[str, Any]) -> None:
    assert pool.run(collectives_of_one, 2, strategy, options, init=False) == [[], []]
