"""Data, random numbers and the life of a Trainer: what all stages have to agree on."""

from __future__ import annotations

import atexit
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parallel.absent.tensor import AbsentTensor
from tests.strategies.harness import joined, largest_difference
from tests.strategies.models import Rows
from tests.strategies.observed import OPTIONS, WIDTH, Net, Observed, fit, loader, make_trainer

BOTH = pytest.mark.parametrize("strategy", ["sync", "async"])


# -- samplers and the order of data --------------------------------------------------------------------------


def noting(seen: list[list[float]]) -> Callback:
    """Every batch that this rank sees, training and validation."""

    def note(trainer: L.Trainer, module: Any, batch: Any, *_: Any) -> None:
        seen.append(batch[0].flatten().tolist())

    return LambdaCallback(on_train_batch_start=note, on_validation_batch_start=note)


class Augmented(Rows):
    """Draws from all three generators, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        inputs, labels = super().__getitem__(index)
        return inputs * random.random() + float(np.random.rand()) + torch.rand(()), labels


class Validated(Net):
    """Draws after its last layer, which only the last stage does, and in a hook that runs there only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        torch.rand(3), np.random.rand(3), random.random()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits_and_loss(batch)
        torch.rand(3), np.random.rand(3), random.random()

    def on_validation_epoch_end(self) -> None:
        torch.rand(3), np.random.rand(3), random.random()


def train_loader(data: str) -> DataLoader[Any]:
    samples = loader().dataset.samples  # type: ignore[attr-defined]
    if data == "workers":  # forked: the pool's processes would import torch anew in each
        return DataLoader(Augmented(samples), 4, shuffle=True, num_workers=1, multiprocessing_context="fork")
    return DataLoader((Augmented if data == "augmented" else Rows)(samples), 4, shuffle=True)


def batches_seen() -> list[list[float]]:
    """With validation, and draws that only the last stage makes."""
    module, seen = Validated(), list[list[float]]()  # seeds its weights
    torch.manual_seed(random.SystemRandom().getrandbits(40))
    np.random.seed(random.SystemRandom().getrandbits(30))
    random.seed()
    validation = DataLoader(train_loader("shuffled").dataset, 4, shuffle=True)
    trainer = make_trainer("sync", [noting(seen)], max_epochs=2, limit_train_batches=3)
    trainer.fit(module, train_loader("workers"), validation)
    return seen


def test_unseeded_runs_see_the_same_data_on_all_stages(launch: Any) -> None:
    ranks = launch(batches_seen, 2)
    assert ranks[0] == ranks[1]


def draw(trainer: L.Trainer, *_: Any, **__: Any) -> None:
    """As a callback that logs a few generated samples."""
    if trainer.is_global_zero:
        torch.rand(3), np.random.rand(3), random.random()


def draw_on_rank_zero(strategy: str, data: str, hook: str, trains: bool = True) -> list[list[float]]:
    """The batches of a training, or of a validation alone. A callback draws in a hook of this name."""
    module, seen = Net() if trains else Validated(), list[list[float]]()
    L.seed_everything(5, workers=True, verbose=False)
    options = {"plan": {"net.2": "row_split"}} if strategy == "tensor" else None
    trainer = make_trainer(strategy, [LambdaCallback(**{hook: draw}), noting(seen)], options)
    if trains:
        trainer.fit(module, train_loader(data))
    else:
        trainer.validate(module, train_loader(data), verbose=False)
    return seen


@pytest.mark.parametrize("given", [
    ("async", "augmented", "on_train_epoch_end"), ("tensor", "shuffled", "on_train_epoch_end"),
    ("sync", "workers", "on_fit_start"), ("sync", "shuffled", "setup", False),
])  # fmt: skip
def test_draws_of_one_rank_leave_the_data_those_of_a_single_process(launch: Any, given: tuple[Any, ...]) -> None:
    single = launch(draw_on_rank_zero, 1, "single", *given[1:])[0]
    assert launch(draw_on_rank_zero, 2, *given) == [single, single]


def validate_other_numbers() -> None:
    samples = loader().dataset.samples  # type: ignore[attr-defined]
    own = Rows(samples[: 8 + 4 * int(os.environ["RANK"])])
    make_trainer("sync", [], None).validate(Validated(), DataLoader(own, 4), verbose=False)


@pytest.mark.parametrize(("runs", "given", "words"), [
    (draw_on_rank_zero, ("sync", "augmented", "on_train_batch_end"), ["is_global_zero"]),
    (draw_on_rank_zero, ("tensor", "augmented", "on_train_batch_end"), ["is_global_zero"]),
    (draw_on_rank_zero, ("sync", "augmented", "on_validation_batch_end", False), []),
    (validate_other_numbers, (), ["of loader 0"]),
])  # fmt: skip
def test_ranks_of_a_replica_with_other_data_end_the_run(refused: Any, runs: Any, given: Any, words: list[str]) -> None:
    """Within an epoch or an evaluation, by draws of one rank, or by unequal numbers of batches."""
    refused(["The ranks of one replica see different batches", *words], runs, 2, *given, error="RuntimeError")


# -- random numbers of the model -----------------------------------------------------------------------------


class Noted(nn.Dropout):
    """Keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.training and not isinstance(output, AbsentTensor):  # not where a loss is tried
            self.masks.append((output != 0).float().flatten().tolist())
        return output


class Denoising(Net):
    """A diffusion model: the noise that is added before the first layer is asked for in the loss."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Noted()) for _ in range(4)))
        self.drop = nn.Dropout(0.2)
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise, keep, shift = torch.randn_like(batch[0]), random.random(), np.random.rand()
        hidden = batch[0] + noise
        drawn = [*noise.flatten().tolist(), keep, shift]
        self.drawn.append(drawn)  # here, since most stages leave the step below
        for layer in self.net:
            hidden = self.drop(hidden)  # holds no parameters: drawn on live values only
            hidden = layer(hidden)
            drawn += torch.rand(2).tolist()
        return F.mse_loss(hidden, noise)

    validation_step = training_step


def draws(strategy: str, seed: int) -> tuple[list[list[float]], dict[int, list[list[float]]]]:
    """What the step draws, and the masks of each layer here, in the order drawn."""
    L.seed_everything(seed, verbose=False)
    module = Denoising()
    options = OPTIONS[strategy] | {"layers": ["net.*"]}
    make_trainer(strategy, [], options, max_epochs=1).fit(module, loader(), loader(8, 2, 5))
    return module.drawn, {i: layer[1].masks for i, layer in enumerate(module.net) if layer[1].masks}


@BOTH
def test_random_numbers_are_the_same_in_every_run_for_any_number_of_stages(launch: Any, strategy: str) -> None:
    """On all stages those of the code between the layers, and of each layer its own."""
    runs = [launch(draws, stages, strategy, seed) for stages, seed in ((2, 5), (4, 5), (2, 6))]
    assert all(len(masks) == 4 // len(run) for run in runs for _, masks in run)
    two, four, other = ({i: masks for _, own in run for i, masks in own.items()} for run in runs)
    assert two == four
    assert all(two[name] != other[name] for name in two)
    masks = [tuple(mask) for own in two.values() for mask in own]
    assert len(masks) == 4 * 6, "a mask a layer and microbatch"
    assert len(set(masks)) == len(masks), "no two alike"
    last, first = (drawn for drawn, _ in runs[0])
    assert len(last) == len(first) == 6 + 4, "microbatches, and batches of validation"
    for position in (0, -1, WIDTH * 2, WIDTH * 2 + 1):  # the noise, between layers, Python's, NumPy's
        assert len({sequence[position] for sequence in last}) == 10, "no two alike"
    for mine, theirs in zip(first, last, strict=True):  # the first stage's step ends before its last layer's draw
        assert WIDTH * 2 + 2 < len(mine) < len(theirs)
        assert mine == theirs[: len(mine)]


class Normed(Net):
    """What it validates with has the statistics."""

    def build(self) -> None:
        self.net[1], self.net[3] = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.logits_and_loss(batch)[1])


@pytest.mark.parametrize(("strategy", "ranks", "options"), [("sync", 2, {"microbatches": 2}), ("data", 1, {})])
def test_batch_norm_normalises_over_a_microbatch_or_a_share(
    launch: Any, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    """As where one process accumulates the gradients of halves."""
    given = {"samples": 12, "validates": True}
    (expected,) = launch(fit, 1, Normed, batch=2, accumulate_grad_batches=2, **given)
    found = launch(fit, ranks, Normed, strategy, options, **given, **({"devices": 2} if strategy == "data" else {}))
    assert largest_difference(joined(found, "weights"), expected.weights) < 1e-12
    if strategy == "sync":
        assert found[0].metrics == pytest.approx(expected.metrics, rel=0, abs=1e-12)


def test_statistics_are_those_of_the_first_replica(launch: Any) -> None:
    kind, given = partial(Normed, moves=False), {"validates": True, "limit_train_batches": 1}
    (expected,) = launch(fit, 1, kind, batch=2, **given)  # its share
    (found,) = launch(fit, 1, kind, "data", {}, devices=2, **given)
    assert found.metrics == pytest.approx(expected.metrics, rel=0, abs=1e-12)


# -- one Trainer and its module, used on ---------------------------------------------------------------------


def use_on(strategy: str) -> dict[str, Any]:
    """Everything that a script may do after ``fit``, with the same Trainer."""
    module, devices = Observed(strategy != "async"), {"devices": 2} if strategy == "data" else {}
    trainer = make_trainer(strategy, [], max_epochs=1, **devices)
    results: dict[str, Any] = {"sanity": trainer.validate(module, loader(8, 4, 5), verbose=False)}
    trainer.fit(module, loader(), loader(8, 4, 5))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(8, 4, 5))
    results["steps"] = (trainer.global_step, trainer.current_epoch)
    results["validate"] = trainer.validate(module, loader(8, 4, 5), verbose=False)
    results["test"] = trainer.test(module, loader(8, 4, 6), verbose=False)
    results["predict"] = trainer.predict(module, loader(8, 4, 6))
    return results


@pytest.mark.parametrize(("strategy", "ranks"), [("sync", 2), ("async", 2), ("data", 1)])
def test_one_trainer_fits_twice_and_evaluates(launch: Any, strategy: str, ranks: int) -> None:
    expected = launch(use_on, 1, "single")[0]
    if strategy == "async":  # weights that stay where they are
        expected["steps"] = (6, 2)
    found = launch(use_on, ranks, strategy)
    for results in found:
        assert results["steps"] == expected["steps"]
        for name in ("sanity",) if strategy == "async" else ("sanity", "validate", "test"):
            assert results[name] == [pytest.approx(expected[name][0], abs=1e-6)], name
    if strategy != "async":
        assert all(torch.equal(a, b) for a, b in zip(found[0]["predict"], expected["predict"], strict=True))


def group_at_exit() -> tuple[bool, bool]:
    """Whether there is a process group when a user's script is over, and once what the strategy left to do is done."""
    at_exit: list[Callable[[], None]] = []
    register = atexit.register
    atexit.register = at_exit.append  # type: ignore[assignment]
    try:
        make_trainer("sync", []).fit(Net(), loader())
    finally:
        atexit.register = register
    before = dist.is_initialized()
    for function in reversed(at_exit):
        function()
    return before, dist.is_initialized()


def test_no_process_group_is_left_to_the_interpreter_s_finalization(launch: Any) -> None:
    assert launch(group_at_exit, 2) == [(True, False)] * 2


HOOKS = "before_optimizer_step", "before_zero_grad", "before_backward", "after_backward", "train_batch_end"


def hook_order(strategy: str) -> list[str]:
    called: list[str] = []
    hooks = LambdaCallback(**{f"on_{name}": lambda *_, name=name: called.append(name) for name in HOOKS})
    make_trainer(strategy, [hooks], max_epochs=1, accumulate_grad_batches=2).fit(Net(), loader())
    return called


def test_hooks_of_a_step_run_in_lightning_s_order(launch: Any) -> None:
    single = launch(hook_order, 1, "single")[0]
    assert launch(hook_order, 2, "sync") == [single, single]
