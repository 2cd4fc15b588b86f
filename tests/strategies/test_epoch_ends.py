"""What the end of an epoch sets, where it runs on one stage, and what else steps and hooks read: equal to one process.

Whatever is set there is read later by all stages: an option of an optimizer, a number, a buffer, what is trained.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn import functional as F

from tests.strategies.failures import assert_lost
from tests.strategies.harness import Report, collect, joined, largest_difference, make_trainer
from tests.strategies.observed import WIDTH, Net, fit, loader
from tools.workers.pool import Failure


class Scaled(Net):
    """Reads a number and a buffer before its first layer."""

    factor = 1.0

    def build(self) -> None:
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


class Sets(Scaled):
    """A rate by a scheduler, a number, a buffer, what is trained; the last layer, which the last stage has whole; what
    is in a dictionary, a tuple, a list and a field of an object, a tensor that is no buffer, and a mode."""

    number = 1.0

    def build(self) -> None:
        super().build()
        self.net[0].requires_grad_(False)
        self.rates, self.pair, self.schedule = {"factor": 1.0}, (1.0, 1), SimpleNamespace(factor=1.0)
        self.factors, self.offset = list[Any]([1.0]), torch.ones(())

    @property
    def factor(self) -> Any:
        found = self.rates["factor"] * self.pair[0] * self.factors[-1] * self.schedule.factor * self.offset
        return found * self.number * (2.0 if self.net[2].training else 1.0)

    def on_train_epoch_end(self) -> None:
        self.by_hand.step()
        self.number = float(self.trainer.callback_metrics["loss"]) / 2
        self.shift += 0.25
        self.net[0].requires_grad_(True)
        self.net[-1].weight.data.mul_(0.9)
        self.rates["factor"] *= 0.5
        self.pair = (self.pair[0] * 1.5, 2)
        self.factors.append(np.mean([0.6, 0.8]))
        self.schedule.factor *= 0.5
        self.offset = self.offset * 3
        self.net[2].eval()


class SetsData(Scaled):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class PutsAnother(Scaled):
    def on_train_epoch_end(self) -> None:
        self.net[0].weight = torch.nn.Parameter(torch.ones(8, WIDTH))


class ScalesWhatIsShared(Scaled):
    """The first stage and the last have this parameter."""

    def build(self) -> None:
        super().build()
        self.net[2], self.net[4] = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 8)
        self.net[4].weight = self.net[0].weight

    def on_train_epoch_end(self) -> None:
        self.net[4].weight.data.mul_(0.9)


def scale(*_: Any) -> Any:
    """A callback's hook runs on all stages."""

    def hook(trainer: Any, module: Any) -> None:
        module.load_state_dict({name: 0.9 * value for name, value in module.state_dict().items()})

    return LambdaCallback(on_train_epoch_end=hook)


def scale_data(self: Net) -> None:
    torch._foreach_mul_([parameter.data for parameter in self.parameters()], 0.9)


def clamp(self: Net) -> None:
    self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def hook_later(self: Net) -> None:
    self.net[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)


ScalesByACallback = type("ScalesByACallback", (Scaled,), {"configure_callbacks": scale})
ScalesData = type("ScalesData", (Scaled,), {"on_train_epoch_end": scale_data})
Hooked = type("Hooked", (Net,), {"build": clamp})
HookedLater = type("HookedLater", (Net,), {"on_train_start": hook_later})


class DividesByTheWorld(Scaled):
    """The size of batches, as in DataModules: for each of the processes that get different ones."""

    def train_dataloader(self) -> Any:
        return loader(12, 4 // self.trainer.world_size)

    def val_dataloader(self) -> Any:
        return loader(8, 4, 5)


class Outside(Net):
    """An optimizer has a parameter that isn't the module's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.2)


class Stepped(Net):
    """Its optimizer has made steps before the run."""

    def build(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters())
        self.net(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer


KINDS = (Sets, ScalesByACallback, DividesByTheWorld)


def train_all(strategy: str, options: dict[str, Any]) -> list[tuple[Report, bool]]:
    """One after the other; and whether its own loader has been replaced."""
    found = []
    for kind in KINDS:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
        module, trainer = kind(), make_trainer(strategy, [], options, max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, *(() if kind is DividesByTheWorld else (loader(12, 4), loader(8, 4, 5))))
        found.append((collect(Report(), trainer, module), "train_dataloader" in vars(module)))
    return found


def test_what_an_epoch_s_end_sets_is_set_on_all_stages(launch: Any) -> None:
    (single,) = launch(train_all, 1, "single", {})
    for schedule in ("1f1b", "zbv"):
        ranks = launch(train_all, 2, "sync", {"microbatches": 2, "schedule": schedule})
        for kind, (expected, _), *reports in zip(KINDS, single, *ranks, strict=True):
            weights = joined([report for report, _ in reports], "weights")
            assert largest_difference(weights, expected.weights) < 1e-12, kind.__name__
            assert not any(left for _, left in reports), kind.__name__


@pytest.mark.parametrize("kind", [ScalesData, SetsData, PutsAnother, ScalesWhatIsShared])
def test_changes_of_other_stages_parameters_at_an_epoch_s_end_are_refused(launch: Any, kind: type[Net]) -> None:
    """By the last stage, at the line that makes them. The others end with it."""
    failures = launch(fit, 2, kind, "sync", expect_errors=True)
    last = [each for each in failures if isinstance(each, Failure) and "runs on the last stage only" in each]
    assert len(last) == 1 and "'net.0." in last[0] and "on another pipeline stage" in last[0], failures
    assert_lost([each for each in failures if each is not last[0]])


@pytest.mark.parametrize(("kind", "strategy", "options", "words"), [
    (Hooked, "sync", None, ["net.2.weight", "on_before_optimizer_step"]),
    (Hooked, "tensor", {"plan": {"net.2": "column", "net.4": "row"}}, ["net.2.weight", "on_before_optimizer_step"]),
    (HookedLater, "fsdp", None, ["net.2.weight", "on_before_optimizer_step"]),
    (Outside, "sync", None, ["SGD", "shape (2,)"]),
    (Stepped, "fsdp", None, ["AdamW", "configure_optimizers"]),
])  # fmt: skip
def test_what_hooks_and_optimizers_must_not_have_is_refused(
    refused: Any, kind: type[Net], strategy: str, options: dict[str, Any] | None, words: list[str]
) -> None:
    """Hooks on gradients of parameters, parameters that the module lacks, and steps that were made before."""
    refused(words, fit, 2, kind, strategy, options)
