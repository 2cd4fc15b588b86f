"""A module with metrics can be copied and pickled while a Trainer runs, and after it has ended or failed."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import suppress
from typing import Any

from lightning.pytorch.callbacks import Callback
from torchmetrics import Metric

from tests.strategies.observed import Observed, loader, make_trainer
from tools.workers.pool import WorkerPool


class Copies(Callback):
    """Copies one of the module's metrics, as a callback with an average of the module copies all of it. The first run
    fails."""

    fails = True

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.copy = copy.deepcopy(module.test_mean)
        self.pickled = pickle.dumps(module.test_mean)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.fails:
            raise ValueError("no luck")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.copy.reset()
        self.copy.update(float(trainer.global_rank))
        self.mean = float(self.copy.compute())


def copied() -> tuple[float, int]:
    """Train after an error: what a copy averages over the ranks, and how many of the others refer to no Trainer."""
    module, copies, alone = Observed(), Copies(), 0
    for copies.fails in (True, False):
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
        options = {"stages": 1, "data_parallel": 2}  # where the module stays whole
        with suppress(ValueError):
            make_trainer("sync", [copies], options, max_epochs=1).fit(module, loader())
        module.trainer = None  # type: ignore[assignment]
        for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), pickle.loads(copies.pickled)):
            metric = made if isinstance(made, Metric) else made.test_mean
            alone += metric.dist_sync_fn is None and metric.process_group is None
    return copies.mean, alone


def test_a_module_with_metrics_is_copied(pool: WorkerPool) -> None:
    assert pool.run(copied, 2, init=False) == [(0.5, 6)] * 2
