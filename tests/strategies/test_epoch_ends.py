"""What the end of an epoch sets, where it runs on one stage, and what else steps and hooks read: equal to one process.

Whatever is set there is read later by all stages: an option of an optimizer, a number, a buffer, what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn import functional as F

from tests.pool import Failure, WorkerPool
from tests.strategies.failures import assert_lost, assert_refused
from tests.strategies.harness import Report, complete, here, joined, largest_difference, make_trainer
from tests.strategies.observed import WIDTH, Net, loader
from tests.thorough import thorough


class Scaled(Net):
    """Reads a number and a buffer before its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("shift", torch.zeros(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        loss = F.cross_entropy(self.net(self.factor * inputs + self.shift), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.logits_and_loss(batch)[1])

    def configure_optimizers(self) -> Any:
        self.by_hand = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(self.parameters(), lr=0.2), 0.5)
        return self.by_hand.optimizer


class SetsAnOption(Scaled):
    def on_train_epoch_end(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class StepsAScheduler(Scaled):
    def on_train_epoch_end(self) -> None:
        self.by_hand.step()


class SetsANumber(Scaled):
    def on_train_epoch_end(self) -> None:
        self.factor = min(self.factor, float(self.trainer.callback_metrics["loss"]))


class SetsABuffer(Scaled):
    def on_train_epoch_end(self) -> None:
        self.shift += 0.25


class Unfreezes(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_end(self) -> None:
        self.net[0].requires_grad_(True)


class ScalesItsLastLayer(Scaled):
    """Which is on the last stage, so the change is whole there."""

    def on_train_epoch_end(self) -> None:
        self.net[-1].weight.data.mul_(0.9)


class ScalesByACallback(Scaled):
    """A callback's hook runs on all stages."""

    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_train_epoch_end=lambda trainer, module: scale(module))]


def scale(module: torch.nn.Module) -> None:
    module.load_state_dict({name: 0.9 * value for name, value in module.state_dict().items()})


class ScalesData(Scaled):
    def on_train_epoch_end(self) -> None:
        torch._foreach_mul_([parameter.data for parameter in self.parameters()], 0.9)


class SetsData(Scaled):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class PutsAnother(Scaled):
    def on_train_epoch_end(self) -> None:
        self.net[0].weight = torch.nn.Parameter(torch.ones(8, WIDTH))


class ScalesWhatIsShared(Scaled):
    """The first stage and the last have this parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2], self.net[4] = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 8)
        self.net[4].weight = self.net[0].weight

    def on_train_epoch_end(self) -> None:
        self.net[4].weight.data.mul_(0.9)


class DividesByTheWorld(Scaled):
    """The size of batches, as in DataModules: for each of the processes that get different ones."""

    def train_dataloader(self) -> Any:
        return loader(12, 4 // self.trainer.world_size)

    def val_dataloader(self) -> Any:
        return loader(8, 4, 5)


class Hooked(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class HookedLater(Scaled):
    def on_train_start(self) -> None:
        self.net[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)


class Outside(Scaled):
    """An optimizer has a parameter that isn't the module's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.2)


class Stepped(Net):
    """Its optimizer has made steps before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters())
        self.net(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer


KINDS = (
    SetsAnOption, StepsAScheduler, SetsANumber, SetsABuffer, Unfreezes, DividesByTheWorld, ScalesItsLastLayer,
    ScalesByACallback,
)  # fmt: skip
LOST = (ScalesData, SetsData, PutsAnother, ScalesWhatIsShared)
MODULES = {kind.__name__: kind for kind in (*KINDS, *LOST, Hooked, HookedLater, Outside, Stepped)}


def train_all(strategy: str, options: dict[str, Any], kinds: Sequence[type[Net]]) -> list[tuple[Report, bool]]:
    """One after the other."""
    return [train(kind.__name__, strategy, options) for kind in kinds]


def train(kind: str, strategy: str, options: dict[str, Any]) -> tuple[Report, bool]:
    torch.set_default_dtype(torch.float64)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
    module = MODULES[kind]()
    trainer = make_trainer(strategy, [], options, max_epochs=2, use_distributed_sampler=False)
    given = () if kind == "DividesByTheWorld" else (loader(12, 4), loader(8, 4, 5))
    trainer.fit(module, *given)
    report = Report(weights={name: complete(p.detach()) for name, p in here(module).items()})
    return report, "train_dataloader" in vars(module)


@pytest.mark.parametrize(
    ("schedule", "kinds"), [("1f1b", KINDS[::2]), ("zbv", KINDS[1::2]), *thorough(("1f1b", KINDS), ("zbv", KINDS))]
)
def test_what_an_epoch_s_end_sets_is_set_on_all_stages(
    pool: WorkerPool, schedule: str, kinds: Sequence[type[Net]]
) -> None:
    (single,) = pool.run(train_all, 1, "single", {}, kinds, init=False)
    ranks = pool.run(train_all, 2, "sync", {"microbatches": 2, "schedule": schedule}, kinds, init=False)
    for kind, (expected, _), *reports in zip(kinds, single, *ranks, strict=True):
        weights = joined([report for report, _ in reports], "weights")
        assert largest_difference(weights, expected.weights) < 1e-12, kind.__name__
        assert not any(left for _, left in reports), kind.__name__


@pytest.mark.parametrize("kind", LOST)
def test_changes_of_other_stages_parameters_at_an_epoch_s_end_are_refused(pool: WorkerPool, kind: Any) -> None:
    """By the last stage, at the line that makes them. The others end with it."""
    failures = pool.run(train, 2, kind.__name__, "sync", {"microbatches": 2}, init=False, expect_errors=True)
    last = [each for each in failures if isinstance(each, Failure) and "runs on the last stage only" in each]
    assert len(last) == 1 and "'net.0." in last[0] and "on another pipeline stage" in last[0], failures
    assert_lost([each for each in failures if each is not last[0]])


@pytest.mark.parametrize(("kind", "strategy"), [
    (Hooked, "sync"), (Hooked, "tensor"), (HookedLater, "fsdp"),
])  # fmt: skip
def test_hooks_on_gradients_of_parameters_are_refused(pool: WorkerPool, kind: Any, strategy: str) -> None:
    options = {"tensor": {"plan": {"net.2": "column", "net.4": "row"}}}.get(strategy, {})
    failures = pool.run(train, 2, kind.__name__, strategy, options, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["net.2.weight", "on_before_optimizer_step"])


def test_parameters_that_the_module_lacks_are_refused(pool: WorkerPool) -> None:
    failures = pool.run(train, 2, "Outside", "sync", {"microbatches": 2}, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["SGD", "shape (2,)"])


def test_an_optimizer_that_has_made_steps_before_is_refused(pool: WorkerPool) -> None:
    failures = pool.run(train, 2, "Stepped", "fsdp", {}, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["AdamW", "configure_optimizers"])
