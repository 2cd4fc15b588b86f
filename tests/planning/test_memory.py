"""What a plan says of memory is what ranks hold: parameters, gradients and optimizer state to the byte, activations
as autograd saves them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from lightning_parallel import plan
from lightning_parallel.comparison import check, runs, timing
from lightning_parallel.planning.layouts import Choice
from recipes.compare.measure import held
from recipes.models.gpt import GPT
from tools.faults.models import Base, Blocks, Pictures, Words
from tools.workers.pool import WorkerPool

COMMON = {"accelerator": "cpu", "precision": "32-true"}


class AdamBlocks(Blocks):
    """With an optimizer that keeps a count for each parameter, and weights of an odd number of rows."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(16, 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counter(Callback):
    """Counts what a rank holds, when gradients are there, and the state after an update."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.found = held(pl_module, trainer.optimizers)


def counted(kind: type[Base], choice: Choice, devices: int) -> dict[str, int]:
    counter, shares = Counter(), runs.Shares(kind.batches())
    layout = check.layout_of(choice.strategy, choice.options, 2)
    trainer = runs.trainer_of(shares, counter, strategy=layout, devices=devices, **COMMON)
    runs.fit(trainer, kind(), None, shares)
    return counter.found


@pytest.mark.parametrize(("kind", "strategy", "devices", "data", "tensor"), [
    (AdamBlocks, "pipeline_zbv", 2, 1, 1),
    (AdamBlocks, "fully_sharded", 2, 2, 1),
    (Words, "pipeline_interleaved", 2, 1, 1),
    (Words, "tensor_parallel", 2, 1, 2),
    (AdamBlocks, "pipeline_1f1b", 4, 1, 2),
    (AdamBlocks, "pipeline_1f1b", 4, 2, 1),  # fully sharded
    (AdamBlocks, "pipeline_1f1b", 4, 2, 2),  # in one stage
])  # fmt: skip
def test_what_is_counted_on_ranks(
    pool: WorkerPool, kind: type[Base], strategy: str, devices: int, data: int, tensor: int
) -> None:
    sharded = data > 1 and "pipeline" in strategy
    memory = "1KiB" if sharded else None  # with less, more is tried
    wanted = strategy, data, tensor, sharded
    row = next(
        each for each in plan(kind(), kind.batches()[0], devices=devices, device="h100", memory=memory).found
        if (each.strategy, each.choice.data, each.choice.tensor, each.choice.sharded) == wanted
    )  # fmt: skip
    on_ranks = pool.run(counted, devices, kind, row.choice, devices, init=False)
    names = ("gradients", "optimizer", "parameters")
    predicted = [{name: getattr(memory, name) for name in names} for memory in row.ranks]
    # The first rank of each stage has the larger parts; the last stage comes first.
    assert predicted == on_ranks[:: data * tensor][::-1]


# -- activations ---------------------------------------------------------------------------------------------------


class Saved:
    """The bytes that autograd saves besides parameters, each memory once."""

    def __init__(self, module: nn.Module) -> None:
        self.sizes: dict[int, int] = {}
        self._own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
        self._kept: list[Tensor] = []

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        self._kept.append(tensor.detach())
        return tensor


class Remembering(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(64, 64)

    def forward(self, x: Tensor, cache: SimpleNamespace) -> Tensor:
        cache.kept[self.number] = self.linear(x) + cache.kept.get(self.number, 0)
        return x + cache.kept[self.number].tanh()


class Cached(L.LightningModule):
    """Hands an object to its layers, to which they write, as language models do with keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.layers = nn.ModuleList(map(Remembering, range(4)))

    def inner(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(kept={})
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.embed(batch[0]))).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adds(Cached):
    """The step itself adds up what its layers return. So all of these cross a cut, and products that are added aren't
    kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def inner(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 2 * layer(x)
        return x


gpt = partial(GPT, optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3}, layers=4, width=64, context=32)


def tokens(vocabulary: int) -> Any:
    return tuple(torch.randint(0, vocabulary, (2, 16, 32)).unbind())


CASES: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt, tokens(256)),
    "Cached": (Cached, tokens(50)),
    "Adds": (Adds, tokens(50)),
    "Pictures": (Pictures, Pictures.batches()[0]),
}


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(("name", "devices", "device"), [
    # Where layers run, each is tried with several sizes.
    ("gpt", 2, "h100"), ("Cached", 2, "h100"), ("Cached", 1, "here"), ("Adds", 4, "here"), ("Pictures", 4, "here"),
])  # fmt: skip
def test_activations_are_those_that_autograd_saves(name: str, devices: int, device: str) -> None:
    """A share of the batch, between the sizes that were tried, and at their ends; layers with memory, and without."""
    make, batch = CASES[name]
    module = make()
    strategy = "ddp" if devices > 1 else "single"
    found = plan(module, batch, devices=devices, device=device)
    assert "By their operations alone" not in str(found)  # all layers were tried
    row = next(each for each in found.found if each.strategy == strategy)
    saved = Saved(module)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    share = tuple(each[: len(each) // devices].clone() for each in batch)
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        module.training_step(share, 0)
    assert row.memory.activations == pytest.approx(sum(saved.sizes.values()), rel=0.05)


def test_checkpointing_holds_the_inputs_of_layers() -> None:
    module, batch = gpt(), tokens(256)
    found = plan(module, batch, devices=2, memory="1KiB", device="h100").found
    choices = (Choice("pipeline_1f1b", 2, microbatches=4, recompute=how) for how in (False, True))
    kept, again = (next(row.chunks for row in found if replace(row.choice, balance=None) == each) for each in choices)
    inputs = 4 * 32 * 64 * 4  # of each block, for 4 samples of 32 positions
    assert again[0].held == pytest.approx(2 * inputs, rel=0.2)
    assert again[0].held < kept[0].held / 5
    assert kept[0].backward + kept[0].forward == pytest.approx(again[0].backward, rel=0.1)  # the embedding runs once


# -- the fullest moment --------------------------------------------------------------------------------------------


class Heavy(L.LightningModule):
    """Weights that are large beside all else, the most of them in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 512)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x).relu()
        return F.cross_entropy(x, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_what_is_frozen_has_no_gradients() -> None:
    module = Heavy()
    for layer in module.layers:
        layer.weight.requires_grad_(False)
    found = plan(module, FULLEST["Heavy"][1], devices=2, device="h100").found
    memory = next(row.memory for row in found if row.strategy == "fully_sharded")
    weight = module.layers[0].weight.nbytes
    assert memory.gradients + memory.activations + memory.working < weight


FULLEST: dict[str, tuple[Any, Any]] = {
    "Adds": CASES["Adds"],
    "speaker": (partial(gpt, layers=2, vocab_size=2048), tokens(2048)),  # more words than all else together
    "Heavy": (Heavy, (torch.randn(32, 256), torch.randint(512, (32,)))),
}


def most(name: str, choice: Choice, devices: int) -> int:
    make, batch = FULLEST[name]
    return timing.on_rank(choice.strategy, choice.options, make(), batch, devices, COMMON, steps=1).held


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(("name", "strategy", "devices", "replicas", "microbatches"), [
    ("Adds", "pipeline_1f1b", 2, 1, 4),
    ("speaker", "tensor_parallel", 2, 1, 1),
    ("Heavy", "fully_sharded", 4, 4, 1),
    ("Heavy", "pipeline_zbv", 4, 2, 2),
    ("Heavy", "pipeline_async", 4, 2, 2),
])  # fmt: skip
def test_the_most_that_ranks_hold_at_once(
    pool: WorkerPool, name: str, strategy: str, devices: int, replicas: int, microbatches: int
) -> None:
    """With the messages, what the code around the layers computes, and gradients on their way to other replicas."""
    make, batch = FULLEST[name]
    found = [(row, row.choice) for row in plan(make(), batch, devices=devices).found if row.strategy == strategy]
    wanted = replicas, microbatches
    row = next(row for row, choice in found if (choice.data, choice.microbatches) == wanted and not choice.sharded)
    held = pool.run(most, devices, name, row.choice, devices, init=False)
    assert max(held) == pytest.approx(row.memory.total, rel=0.05)
