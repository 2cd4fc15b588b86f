"""Modules with manual optimization have the numbers of one process. Two that take turns are in the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from tests.strategies.contract_models import TwoOptimizers, loader
from tests.strategies.harness import Report, collect, joined, largest_difference, make_trainer
from tools.optimizer_table import optimizers

EXACT = 1e-12  # float64


class Accumulating(TwoOptimizers):
    """One optimizer, a step after every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) + self.judged(batch["x"], False)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        self.seen.append(float(loss))

    def make_optimizers(self) -> Any:
        optimizer = self.optimizer_of(*self.parameters())
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class SharedGraph(TwoOptimizers):
    """Two backwards through one graph, on to different optimizers; one in a closure, of an optimizer that treats
    parameters as wholes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        made = self(batch["x"])
        fooled = self.judged(made, True)
        self.manual_backward(fooled, retain_graph=True)
        self.manual_backward(0.5 * made.pow(2).mean())
        first.step()
        second.zero_grad()

        def closure() -> Tensor:
            loss = self.judged(batch["x"], True) + self.judged(made.detach(), False)
            self.manual_backward(loss)
            return loss

        self.seen += [float(fooled), float(second.step(closure))]

    def make_optimizers(self) -> Any:
        first = self.optimizer_of(*self.generator.parameters(), self.shift)
        return [first, optimizers.Kronecker(self.discriminator.parameters())]


class GradientPenalty(SharedGraph):
    """A second derivative: the loss has the norm of a gradient in it (WGAN-GP)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        between = (0.3 * batch["x"] + 0.7 * self(batch["x"]).detach()).requires_grad_()
        scores = self.discriminator(between)
        [gradient] = torch.autograd.grad(scores.sum(), between, create_graph=True)
        loss = scores.mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        first.zero_grad()
        other = -self.discriminator(self(batch["x"])).mean()
        self.manual_backward(other)
        first.step()
        self.seen += [float(loss), float(other)]


class Direct(TwoOptimizers):
    """A backward that the strategy doesn't see."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()


def fit(model: type[TwoOptimizers], strategy: str = "single", options: dict[str, Any] | None = None) -> Report:
    module, trainer = model(), make_trainer(strategy, [], options or {})
    module.seen = []  # what the steps report
    layout = getattr(trainer.strategy, "layout", None)
    trainer.fit(module, loader(trainer.distributed_sampler_kwargs if layout and layout.size("data") > 1 else None))
    report = collect(Report(), trainer, module)
    report.losses = module.seen
    return report


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), [
    (Accumulating, "tensor", 4, {"tensor_parallel": 2, "data_parallel": 2}), (Accumulating, "fsdp", 2, {}),
    (SharedGraph, "tensor", 2, {}), (SharedGraph, "fsdp", 2, {"reshard_after_forward": False, "cpu_offload": True}),
    # Where the network of a gradient penalty is whole.
    (GradientPenalty, "tensor", 2, {"tensor_parallel": 1, "data_parallel": 2}),
    (GradientPenalty, "fsdp", 2, {"units": ["generator"]}),
])  # fmt: skip
def test_manual_optimization_trains_as_in_one_process(
    launch: Any, model: type[TwoOptimizers], strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    [whole] = launch(fit, 1, model)
    reports = launch(fit, ranks, model, strategy, options)
    # Each replica's losses are those of its share.
    losses = torch.tensor([report.losses for report in reports], dtype=torch.float64).mean(0)
    assert losses.tolist() == pytest.approx(whole.losses, rel=0, abs=EXACT)
    assert largest_difference(joined(reports, "weights"), whole.weights) < EXACT


@pytest.mark.parametrize(("model", "strategy", "options", "words"), [
    (GradientPenalty, "tensor", {}, ["second derivative", "create_graph=True"]),  # its network is divided
    (GradientPenalty, "fsdp", {}, ["second derivative", "`units`"]),
    # A backward past the strategy.
    (Direct, "tensor", {}, ["self.manual_backward"]),
    (Direct, "fsdp", {"units": ["discriminator"]}, ["self.manual_backward"]),
])  # fmt: skip
def test_backwards_that_cannot_be_followed_are_refused(
    refused: Any, model: type[TwoOptimizers], strategy: str, options: dict[str, Any], words: list[str]
) -> None:
    refused(words, fit, 2, model, strategy, options, error="RuntimeError")
