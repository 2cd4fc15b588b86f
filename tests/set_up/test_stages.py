"""Every rank holds its stage of the module, whatever it made before."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.strategies import harness
from tests.strategies.harness import here
from tests.strategies.models import MODELS
from tools.workers.pool import WorkerPool


class AtStart(Callback):
    """The parameters on this rank when training starts."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.values = {name: p.detach().clone() for name, p in here(module).items()}


def start_from_other_weights_on_each_rank(model: str) -> dict[str, Tensor]:
    """What each rank's parameters differ by from the model's: by its rank, before set-up."""
    start, module = AtStart(), MODELS[model]()
    before = {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}
    trainer = harness.make_trainer("sync", [start], {"microbatches": 1}, max_steps=1, limit_val_batches=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(trainer.global_rank)
    trainer.fit(module, MODELS[model].loader())
    return {name: (value - before[name]).mean().round() for name, value in start.values.items()}


@pytest.mark.parametrize(("model", "shared"), [
    ("GPT2", {"model.transformer.wte.weight": (0, 2), "model.lm_head.weight": (0, 2)}),
    ("Blocks", {"position": (0, 1, 2), "unused": (0, 1, 2), "temperature": (0, 1, 2)}),
])  # fmt: skip
def test_what_several_stages_hold_is_the_first_one_s_and_the_rest_each_stage_s_own(
    pool: WorkerPool, model: str, shared: dict[str, tuple[int, ...]]
) -> None:
    ranks = pool.run(start_from_other_weights_on_each_rank, 3, model, init=False)
    names = [name for found in ranks for name in found]
    assert set(names) == {name for name, _ in MODELS[model]().named_parameters(remove_duplicate=False)}
    for name in set(names):
        holders = {2 - rank: int(found[name]) for rank, found in enumerate(ranks) if name in found}
        if name in shared:
            assert holders == dict.fromkeys(shared[name], 2), name  # stage 0 is on rank 2
        else:
            ((stage, value),) = holders.items()
            assert value == 2 - stage, name
