"""Every rank holds its stage of the module, whatever it made before, and its optimizer that stage's parameters."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.pool import WorkerPool
from tests.strategies import harness
from tests.strategies.harness import here, largest_difference
from tests.strategies.models import MODELS
from tests.strategies.observed import CLASSES, WIDTH, Net, loader, make_trainer

# -- parameters ----------------------------------------------------------------------------------------------


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


# -- the optimizer -------------------------------------------------------------------------------------------


class Grouped(Net):
    """Groups that lie on one stage, on all, and a frozen one; state for every parameter before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES))
        self.net[1].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        weights = [layer.weight for layer in self.net[1:]]
        biases = [layer.bias for layer in self.net]
        groups = [
            {"params": [self.net[0].weight], "lr": 0.3},
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "lr": 0.2, "lr_decay": 0.1},
        ]
        return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)


def train_grouped(strategy: str) -> tuple[dict[str, Tensor], list[list[str]], list[Any], list[str]]:
    torch.set_default_dtype(torch.float64)
    module = Grouped()
    trainer = make_trainer(strategy, [])
    trainer.fit(module, loader())
    names = {id(p): name for name, p in module.named_parameters()}
    (optimizer,) = trainer.optimizers
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    weights = {name: p.detach().clone() for name, p in here(module).items()}
    return weights, groups, options, [names[id(p)] for p in optimizer.state]


def test_each_stage_s_optimizer_has_all_groups_with_the_parameters_held_there(pool: WorkerPool) -> None:
    weights, groups, options, _ = pool.run(train_grouped, 1, "single", init=False)[0]
    found: dict[str, Tensor] = {}
    for held, mine, its_options, with_state in pool.run(train_grouped, 4, "sync", init=False):
        assert mine == [[name for name in group if name in held] for group in groups]
        assert its_options == options
        assert sorted(with_state) == sorted(held)
        found |= held
    assert largest_difference(found, weights) < 1e-12
