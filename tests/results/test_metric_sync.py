"""A module with metrics can be copied and pickled while a Trainer runs, and after it has ended or failed."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torchmetrics import SumMetric

from tests.strategies.harness import make_trainer
from tests.strategies.shardable import Mixed
from tools.workers.pool import WorkerPool


class Counting(Mixed):
    """Counts its samples with a metric. The first run fails in its second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()
        self.failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and not self.failed:
            self.failed = True
            raise ValueError("no luck")
        loss = super().training_step(batch, batch_idx)
        self.count(len(batch[0]))
        return loss


class Copies(Callback):
    """Copies the module's metrics, as a callback with an average of the module copies all of it."""

    def on_train_start(self, trainer: Any, module: Counting) -> None:
        self.copy = copy.deepcopy(module.count)
        self.pickled = pickle.dumps(module.count)

    def on_train_end(self, trainer: Any, module: Counting) -> None:
        self.copy.reset()
        self.copy.update(1.0)
        self.replicas = float(self.copy.compute())


def copied(strategy: str, options: dict[str, Any]) -> tuple[float, int]:
    """Train after an error: over how many ranks a copy adds up, and how many of the others refer to no Trainer."""
    torch.set_default_dtype(torch.float64)
    module, copies, alone = Counting(), Copies(), 0
    for fails in (True, False):
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
        trainer = make_trainer(strategy, [copies], options, max_epochs=1)
        try:
            trainer.fit(module, module.loader())
        except ValueError:
            assert fails
        module.trainer = None  # type: ignore[assignment]
        for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), pickle.loads(copies.pickled)):
            metric = made if isinstance(made, SumMetric) else made.count
            alone += metric.dist_sync_fn is None and metric.process_group is None
    return copies.replicas, alone


def test_a_module_with_metrics_is_copied(pool: WorkerPool) -> None:
    options = {"stages": 1, "data_parallel": 2}  # where the module stays whole
    assert pool.run(copied, 2, "sync", options, init=False) == [(2, 6)] * 2
