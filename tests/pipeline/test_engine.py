"""What stages hold while they run, and that one which ends before the others takes no message with it."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.ranks import process_group
from tests.strategies.harness import make_trainer
from tools.workers.pool import WorkerPool


class Token:
    """What a graph holds as long as it lives."""


class Probe(torch.autograd.Function):
    """Identity; a token lives as long as its node in the graph. Its backward takes a while."""

    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.token, ctx.seconds = Token(), seconds
        Probe.alive.add(ctx.token)
        Probe.most = max(Probe.most, len(Probe.alive))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Layer(nn.Linear):
    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Probe.apply(super().forward(x), self.seconds).tanh()  # type: ignore[no-untyped-call,no-any-return]


class Probed(L.LightningModule):
    """As many layers as stages, and a skip over all of them."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(4, 4) for _ in range(stages)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first = self.layers[0](batch)
        loss: Tensor = (self.layers[1:](first) + first).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch(Callback):
    """Notes the most graphs that were alive at a time, and the most messages that no neighbour had confirmed."""

    def __init__(self) -> None:
        self.graphs = self.messages = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # before, losses are tried
            Probe.most = len(Probe.alive)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.graphs = Probe.most
        for chunk in trainer.strategy.at_work.engine._chunks.values():
            ways = [way.activations for way in chunk._ends.out_of.values()]
            ways += [way.gradients for way in chunk._ends.into.values()]
            self.messages = max(self.messages, *(len(sender._unconfirmed) for sender in ways))
        if "Async" not in type(trainer.strategy).__name__ and not trainer.is_global_zero:
            assert not Probe.alive  # the last stage has its losses' graphs
            assert not any(isinstance(each, Arrival) for each in gc.get_objects())  # without a collection of garbage


def held(strategy: str, stages: int, microbatches: int, options: dict[str, Any], frozen: bool = False) -> Any:
    watch, module = Watch(), Probed(stages)
    module.layers[0].requires_grad_(not frozen)
    trainer = make_trainer(strategy, [watch], {"microbatches": microbatches, **options}, max_epochs=1)
    batches = 6 if strategy == "async" else 3
    trainer.fit(module, DataLoader(torch.randn(batches * microbatches, 4), batch_size=microbatches))  # type: ignore[arg-type]
    return watch.graphs, watch.messages


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 6), ("1f1b", 2), ("1f1b", 6)])
def test_activations_held_are_those_that_the_schedule_promises(
    pool: WorkerPool, schedule: str, microbatches: int
) -> None:
    _, *ranks = pool.run(held, 4, "sync", 4, microbatches, {"schedule": schedule}, init=False)
    for before_last, (graphs, messages) in enumerate(ranks, 1):
        assert messages == 0  # after a batch: a process that ends then would take them with it
        assert graphs == (microbatches if schedule == "gpipe" else min(1 + before_last, microbatches))  # min(p - s, m)


@pytest.mark.parametrize(("stages", "microbatches", "extra", "frozen"), [
    (4, 2, 0, False), (3, 1, 1, False), (2, 1, 0, True),
])  # fmt: skip
def test_asynchronous_memory_is_bounded(
    pool: WorkerPool, stages: int, microbatches: int, extra: int, frozen: bool
) -> None:
    """Also where no gradient confirms the first stage's messages, since it is ``frozen``."""
    _, *ranks = pool.run(held, stages, "async", stages, microbatches, {"extra_in_flight": extra}, frozen, init=False)
    for before_last, (graphs, messages) in enumerate(ranks, 1):
        ahead = before_last * (1 + extra)
        assert frozen or graphs == ahead + 1  # p - s
        assert messages <= (2 if frozen else ahead + 3)


def leaves_at_once(strategy: str) -> int:
    """A rank that is done closes its connections, whatever the others still have to do. The first stage is slow."""
    module = Probed(3)
    module.layers[0].seconds = 0.05
    trainer = make_trainer(strategy, [], {"microbatches": 2}, max_epochs=1)
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))  # type: ignore[arg-type]
    process_group.leave()
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_process_that_ends_early_takes_no_message_with_it(pool: WorkerPool, strategy: str) -> None:
    assert pool.run(leaves_at_once, 3, strategy, init=False) == [2, 2, 2]
