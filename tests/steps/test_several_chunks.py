"""What a step logs, counts and draws before its layers counts once, however many chunks the last stage has. What it
changes where the dry run has not seen it ends the run."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_parallel.steps.changes import StepChanges
from tests.strategies.harness import make_trainer
from tools.workers.pool import WorkerPool


class Net(L.LightningModule):
    """Logs, updates metrics and draws noise before the first layer, and after the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seen, self.mean = SumMetric(), MeanMetric()

    def loss(self, x: Tensor) -> Tensor:
        self.seen.update(x.shape[0])
        self.log("size", float(x.shape[0]), reduce_fx="sum", on_epoch=True, on_step=False, batch_size=len(x))
        noise = torch.rand(len(x), 1)
        x = x + noise
        for layer in self.layers:
            x = layer(x).tanh()
        loss = (x - noise).square().mean()
        self.mean.update(loss.detach(), len(x))
        return loss

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(self.changed(batch))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.loss(self.changed(batch)))
        self.log("val_x", batch["x"].square().mean())

    def changed(self, batch: dict[str, Tensor]) -> Tensor:
        batch["x"] = batch["x"] * 0.5
        return batch["x"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class InPlace(Net):
    def changed(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].mul_(0.5)


def metrics(schedule: str, kind: type[Net]) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    samples = [{"x": row} for row in data]
    trainer = make_trainer("sync", [], {"schedule": schedule, "microbatches": 2, "layers": ["layers.*"]})
    trainer.fit(kind(), *(DataLoader(samples, batch_size=4) for _ in range(2)))  # type: ignore[arg-type]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_runs_for_earlier_chunks_leave_no_trace_and_a_change_of_the_batch_in_place_is_refused(pool: WorkerPool) -> None:
    expected, found, in_place = (
        pool.run(metrics, 2, schedule, kind, init=False)
        for schedule, kind in (("1f1b", Net), ("zbv", Net), ("1f1b", InPlace))
    )
    assert expected[0].keys() >= {"seen", "mean", "size", "loss", "val_loss", "val_x"}
    assert expected[0]["seen"] == 16  # in training and in validation
    for theirs, ours in zip(expected, found, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)
    assert in_place[0] == pytest.approx(expected[0], rel=0, abs=1e-12)
    for failure in pool.run(metrics, 2, "zbv", InPlace, init=False, expect_errors=True):
        assert "training_step changes a tensor of its batch in place. A stage with several chunks" in failure
        assert "'1f1b'" in failure


# -- what changes where the dry run hasn't seen it ---------------------------------------------------------------------


def test_one_that_is_changed_and_put_back_is_left_alone() -> None:
    """As PEFT does for the time of a call, where it adapts a parameter that is in no layer of its own."""
    module = nn.Linear(3, 2)
    changes = StepChanges(module)

    @torch.no_grad()
    def step() -> None:
        own = module.bias.clone()
        module.bias.add_(1)
        module.bias.copy_(own)

    for _ in range(2):
        changes.begin_batch((), 2, 1)
        for k in range(2):
            changes.run(step, k)


def test_one_that_is_replaced_for_each_microbatch_is_refused() -> None:
    module = nn.Linear(3, 2)
    changes = StepChanges(module)

    def step() -> None:
        module.bias = nn.Parameter(module.bias.detach() + 1)

    changes.begin_batch((), 2, 1)
    changes.run(step, 0)
    with pytest.raises(RuntimeError, match="'bias'"):
        changes.run(step, 1)


def test_a_buffer_that_other_stages_read_must_not_be_changed_by_its_layer() -> None:
    module = nn.BatchNorm1d(2)
    changes = StepChanges(module, ["running_mean"])
    changes.begin_batch((), 1, 1)
    changes.run(lambda: module.num_batches_tracked.add_(1), 0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="'running_mean'"):
        changes.run(lambda: module.running_mean.add_(1), 0)  # type: ignore[union-attr]
