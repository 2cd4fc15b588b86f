"""A module that holds a part of the model: it says so when it is called, and is asked once what it does with it."""

from __future__ import annotations

import pickle
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.set_up.part_of_model import move_others
from tests.strategies.harness import ALL, complete, here, make_trainer
from tools.workers.pool import WorkerPool


class Called(ALL["LeNet"]):  # type: ignore[misc]
    def forward(self, images: Any) -> Any:
        return self.net(images)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self.net(batch[0]).argmax(1)


def call_afterwards(strategy: str) -> int:
    """After a fit, after a prediction, and in a second fit. Another Trainer has no use for a stage."""
    module, loader = Called(), Called.loader()
    trainer = make_trainer(strategy, [], {}, max_epochs=1)
    trainer.fit(module, loader)
    images, labels = next(iter(loader))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="trainer.predict") as caught:
            module(images)
        assert "each rank holds a part" in str(caught.value) and "checkpoint" in str(caught.value)
        if strategy != "fsdp":  # where its layers, units, are gathered for a call
            with pytest.raises(RuntimeError, match="each rank holds a part"):
                module.predict_step((images, labels))
            pickle.dumps(list(module._forward_pre_hooks.values()))
        trainer.predict(module, loader)
    again = make_trainer(strategy, [], {}, max_epochs=1)
    again.fit(Called(), loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    if strategy != "fsdp":
        with pytest.raises(RuntimeError, match=r"another Trainer has made of it\. Make a new one"):
            make_trainer(strategy, [], {}, max_epochs=1).fit(module, loader)
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["async", "fsdp"])
def test_a_module_says_what_it_is_when_it_is_called_and_can_be_trained_again(pool: WorkerPool, strategy: str) -> None:
    assert all(steps > 0 for steps in pool.run(call_afterwards, 2, strategy, init=False))


def call_shards() -> bool:
    module = ALL["ShardableLlama"]()
    make_trainer("tensor", [], {}, max_epochs=1).fit(module, module.loader())
    batch = next(iter(module.loader()))
    return bool(torch.isfinite(module.loss(batch)))


def test_a_module_of_shards_can_be_called_by_all_ranks(pool: WorkerPool) -> None:
    assert pool.run(call_shards, 2, init=False) == [True, True]


# -- configure_part ------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {"microbatches": 2},
    "async": {"microbatches": 2},
    "tensor": {"plan": {"layers.0": "column", "layers.1": "row"}},
    "fsdp": {},
}


class Stored(L.LightningModule):
    """Its weights are stored in bfloat16, and trained in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).bfloat16()
        self.here: list[int] = []

    def setup(self, stage: str) -> None:
        if not getattr(self.trainer.strategy, "calls_configure_part", False):
            self.configure_part()
        else:
            assert self.layers[0].weight.dtype is torch.bfloat16

    def configure_part(self) -> None:
        held = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        self.here.append(sum(p.numel() for p in held if not isinstance(p, AbsentTensor)))
        self.float()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.here, "the optimizer is made for the part that has been configured"
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy: str) -> tuple[list[int], dict[str, Tensor]]:
    trainer = make_trainer(strategy, [], STRATEGIES.get(strategy, {}), max_steps=2, use_distributed_sampler=False)
    module = Stored()
    trainer.fit(module, DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=4))  # type: ignore[arg-type]
    return module.here, {name: complete(p.detach()) for name, p in here(module).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_asked_once_for_what_the_rank_holds_and_trains_that_as_in_one_process(
    pool: WorkerPool, strategy: str
) -> None:
    ((_, expected),) = pool.run(fit, 1, "single", init=False)
    for counts, weights in pool.run(fit, 2, strategy, init=False):
        assert len(counts) == 1 and {weight.dtype for weight in weights.values()} == {torch.float32}
        assert counts[0] < sum(weight.numel() for weight in expected.values())
        if strategy in ("sync", "fsdp"):  # others have parts of weights, or late gradients
            assert all(torch.allclose(weight, expected[name], rtol=0, atol=1e-6) for name, weight in weights.items())


class Measured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device="meta")
        self.metric = MeanMetric()


def test_metrics_follow_parameters_that_are_on_the_device_already() -> None:
    module = Measured()
    move_others(module, torch.device("meta"))
    assert module.metric.device == module.device == torch.device("meta")
