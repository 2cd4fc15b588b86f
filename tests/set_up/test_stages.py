"""Every rank holds its stage of the module, whatever it made before, and its optimizer that stage's parameters."""

from __future__ import annotations

import logging
import re
import socket
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


def listen_to_the_banner() -> tuple[list[str], dict[str, int]]:
    told: list[str] = []

    def listen(entry: logging.LogRecord) -> bool:
        told.append(entry.getMessage())
        return True

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)  # workers of the pool are quiet
    logger.addFilter(listen)
    module = Net()
    make_trainer("async", [], max_epochs=1).fit(module, loader())
    logger.removeFilter(listen)
    logger.setLevel(logging.NOTSET)
    table = [line for text in told for line in text.splitlines() if "memory expected" in text]
    return table, {n: p.numel() for n, p in here(module).items()}


def test_the_table_at_the_start_tells_every_stage_s_layers_and_size_once(pool: WorkerPool) -> None:
    (told, *last), *others = pool.run(listen_to_the_banner, 3, init=False)
    assert [text for text, _ in others] == [[], []]
    titles, *rows = told
    assert re.split("  +", titles) == [
        "rank", "host", "device", "stage", "layers", "parameters", "memory expected", "gradients"
    ]  # fmt: skip
    sizes = [sum(held.values()) for held in (last[0], others[0][1], others[1][1])]
    place = rf"\s+(\d) +{re.escape(socket.gethostname())} +cpu +(\d) .* ([\d,]+)  +[\d.]+ KiB"
    found = [re.match(place, row) for row in rows]
    assert [[int(cell.replace(",", "")) for cell in each.groups()] for each in found if each] == [
        [0, 2, sizes[0]], [1, 1, sizes[1]], [2, 0, sizes[2]]
    ]  # fmt: skip
    assert sum(sizes) == sum(p.numel() for p in Net().parameters())
    # Both of an update's microbatches are late. Held: what forwards read of two versions.
    assert rows[2].endswith("1 update late, corrected, up to 2 more copies of the weights")
    assert rows[0].endswith("not late")


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


# -- the module afterwards -----------------------------------------------------------------------------------


def use_module_after() -> list[str]:
    module = Net()
    make_trainer("sync", [], max_epochs=1).fit(module, loader())
    texts = [f"{sum(p.numel() for p in here(module).values()) < sum(p.numel() for p in module.parameters())}"]
    with pytest.raises(RuntimeError) as caught:
        module.net(torch.randn(2, WIDTH))
    texts.append(str(caught.value))
    with pytest.raises(RuntimeError) as refused:
        make_trainer("sync", [], max_epochs=1).fit(module, loader())
    return [*texts, str(refused.value)]


def test_a_module_that_was_cut_says_so_when_it_is_used(pool: WorkerPool) -> None:
    for smaller, value, second in pool.run(use_module_after, 2, init=False):
        assert smaller == "True"
        assert "can't be called: since its Trainer ran, each rank holds a part" in value
        assert "holds one stage of a pipeline that another Trainer has made of it" in second
        assert "Make a new one" in second


# -- groups --------------------------------------------------------------------------------------------------
