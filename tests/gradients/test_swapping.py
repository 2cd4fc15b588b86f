"""Gradients are taken off and put back. A pipeline keeps those of the last update only if somebody may read them."""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.harness import make_trainer
from tools.workers.pool import WorkerPool


class Net(L.LightningModule):
    """Counts, in each step, the gradients of the update before that are still there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.last: list[Any] = []
        self.kept: list[int] = []
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.state.fn == "fit" and self.trainer.fit_loop.epoch_loop.batch_idx >= 0 and self.last:
            self.kept.append(sum(each() is not None for each in self.last))
            self.last = []
        return self.layers(batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.last = [weakref.ref(p.grad) for p in self.layers.parameters() if p.grad is not None]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Looks(Net):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(sum(float(p.grad.norm()) for p in self.layers.parameters() if p.grad is not None))


class OwnZeroGrad(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class LooksInTheOptimizer(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OwnZeroGrad(self.parameters(), 0.1)


class Callback(L.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


class LooksInACallback(Net):
    """Which comes after the strategy's set-up."""

    def on_fit_start(self) -> None:
        self.trainer.callbacks.append(Callback())


class LooksLater(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.callbacks.append(Callback())


KINDS = [Net, Looks, LooksInTheOptimizer, LooksInACallback, LooksLater]


def fit(kinds: list[type[Net]], strategy: str) -> list[tuple[list[int], list[float]]]:
    modules = [kind() for kind in kinds]
    for module in modules:
        trainer = make_trainer(strategy, [], {"microbatches": 2}, max_steps=3)
        trainer.fit(module, DataLoader(torch.ones(12, 4), batch_size=4))  # type: ignore[arg-type]
    return [(module.kept, module.seen) for module in modules]


def test_the_last_gradients_are_kept_only_if_somebody_may_look_at_them(pool: WorkerPool) -> None:
    ranks = pool.run(fit, 2, KINDS, "sync", init=False)
    for found in ranks:
        # A weight and a bias in each of two layers.
        assert [kept for kept, _ in found] == [[0, 0], *[[4, 4]] * 4]
    (((_, expected),),) = pool.run(fit, 1, [Looks], "single", init=False)
    parts = zip(*(found[1][1] for found in ranks), strict=True)
    assert [sum(each) for each in parts] == pytest.approx(expected, rel=1e-5)
    assert expected[0] == 0 < expected[1]
