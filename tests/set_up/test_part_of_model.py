"""set_up/part_of_model.py: a module that holds a part of the model says so when it is called."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.pool import WorkerPool
from tests.strategies.harness import ALL, make_trainer


class Called(ALL["LeNet"]):  # type: ignore[misc]
    def forward(self, images: Any) -> Any:
        return self.net(images)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self.net(batch[0]).argmax(1)


def call_afterwards(strategy: str) -> int:
    """After a fit, after a prediction, and in a second fit."""
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
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["sync", "async", "fsdp"])
def test_a_module_says_what_it_is_when_it_is_called_and_can_be_trained_again(pool: WorkerPool, strategy: str) -> None:
    assert all(steps > 0 for steps in pool.run(call_afterwards, 2, strategy, init=False))


def call_shards() -> bool:
    module = ALL["ShardableLlama"]()
    make_trainer("tensor", [], {}, max_epochs=1).fit(module, module.loader())
    batch = next(iter(module.loader()))
    return bool(torch.isfinite(module.loss(batch)))


def test_a_module_of_shards_can_be_called_by_all_ranks(pool: WorkerPool) -> None:
    assert pool.run(call_shards, 2, init=False) == [True, True]
