"""set_up/part_of_model.py: a module is asked once for what it does with its part, when it has one."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.absent.tensor import AbsentTensor
from tests.pool import WorkerPool
from tests.strategies.harness import complete, here

STRATEGIES: dict[str, Any] = {
    "pipeline": lambda: lp.PipelineStrategy(microbatches=2),
    "async": lambda: lp.AsyncPipelineStrategy(microbatches=2),
    "tensor": lambda: lp.TensorParallelStrategy(plan={"layers.0": "column", "layers.1": "row"}),
    "fully sharded": lambda: lp.FullyShardedStrategy(),
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


def fit(strategy: str | None) -> tuple[list[int], dict[str, Tensor]]:
    trainer = L.Trainer(
        accelerator="cpu", devices=2 if strategy else 1, strategy=STRATEGIES[strategy]() if strategy else "auto",
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = Stored()
    trainer.fit(module, DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=4))  # type: ignore[arg-type]
    return module.here, {name: complete(p.detach()) for name, p in here(module).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_asked_once_for_what_the_rank_holds(pool: WorkerPool, strategy: str) -> None:
    whole = 4 * 8 + 8 + 8 * 4 + 4
    for counts, weights in pool.run(fit, 2, strategy, init=False):
        assert len(counts) == 1 and {weight.dtype for weight in weights.values()} == {torch.float32}
        assert counts[0] < whole


@pytest.mark.parametrize("strategy", ["pipeline", "fully sharded"])
def test_weights_that_are_stored_otherwise_train_as_in_one_process(pool: WorkerPool, strategy: str) -> None:
    ((_, expected),) = pool.run(fit, 1, None, init=False)
    found: dict[str, Tensor] = {}
    for _, weights in pool.run(fit, 2, strategy, init=False):
        found |= weights
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-6) for name in expected)
