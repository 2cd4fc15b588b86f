"""gradients/in_trainer.py: ``gradient_clip_val`` clips by the whole model's gradient, whatever part a rank holds."""

from __future__ import annotations

from typing import Any

import torch

from tests.pool import WorkerPool
from tests.strategies.harness import joined, largest_difference, make_trainer, train
from tests.strategies.models import MODELS


def test_fully_sharded_stages_are_clipped_by_value_as_one_process(pool: WorkerPool) -> None:
    clipping: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    options = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    reports = pool.run(train, 4, "Llama", "sync", options, init=False, batch_size=4, **clipping)
    whole = pool.run(train, 2, "Llama", "sync", {"microbatches": 4}, init=False, **clipping)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < 1e-12


class Outside(MODELS["Blocks"]):  # type: ignore[misc]
    """The optimizer has a parameter that is none of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [torch.nn.Parameter(torch.ones(()))]

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args) * self.extra[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1)


def clip_outside() -> float:
    module = Outside()
    make_trainer("fsdp", [], {}, gradient_clip_val=0.001).fit(module, Outside.loader())
    return float(module.extra[0].detach())


def test_a_parameter_outside_the_module_is_clipped_too(pool: WorkerPool) -> None:
    for extra in pool.run(clip_outside, 2, init=False):
        assert 0.9 < extra < 1
