"""Modules that run backwards and optimizers themselves, and a run of one that reports all there is to compare."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.strategies.harness import Report, collect, make_trainer
from tests.strategies.models import Rows
from tools.optimizer_table import optimizers

NOISE, WIDTH, SAMPLES, BATCH = 4, 6, 16, 8


class _ByHand(L.LightningModule):
    """Seeded data; what the steps report is kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = False
        self.seen: list[list[float]] = []
        self.generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {
            "generator.0": "column", "generator.2": "row",
            "discriminator.0": "column", "discriminator.2": "row",
        }  # fmt: skip

    def saw(self, *values: Any) -> None:
        self.seen.append([float(value) for value in values])

    @classmethod
    def loader(cls, share: Any = None, batch_size: int = BATCH) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        real = torch.randn(SAMPLES, WIDTH, generator=generator)
        noise = torch.randn(SAMPLES, NOISE, generator=generator)
        rows = Rows(list(zip(real, noise, strict=True)))
        sampler = None if share is None else DistributedSampler(rows, **share, shuffle=False)
        return DataLoader(rows, batch_size=batch_size, sampler=sampler)


def is_real(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


class Accumulating(_ByHand):
    """One optimizer, a step after every second batch; its parts are called by the module's forward."""

    def forward(self, noise: Tensor) -> Tensor:
        return self.discriminator(self.generator(noise))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        loss = is_real(self(noise), True) + is_real(self.discriminator(real), False)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        self.saw(loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class SharedGraph(_ByHand):
    """Two backwards through one graph, on to different optimizers; one in a closure, of an optimizer that treats
    parameters as wholes."""

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        opt_g.zero_grad()
        opt_d.zero_grad()
        made = self(noise)
        fooled = is_real(self.discriminator(made), True)
        self.manual_backward(fooled, retain_graph=True)
        self.manual_backward(0.5 * made.pow(2).mean())
        opt_g.step()
        opt_d.zero_grad()

        def closure() -> Tensor:
            loss = is_real(self.discriminator(real), True) + is_real(self.discriminator(made.detach()), False)
            self.manual_backward(loss)
            return loss

        self.saw(fooled, opt_d.step(closure))

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-2, eps=1e-4)
        return [opt_g, optimizers.Kronecker(self.discriminator.parameters())]


class GradientPenalty(SharedGraph):
    """A second derivative: the loss has the norm of a gradient in it (WGAN-GP)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        between = (0.3 * real + 0.7 * self(noise).detach()).requires_grad_()
        scores = self.discriminator(between)
        [gradient] = torch.autograd.grad(scores.sum(), between, create_graph=True)
        loss = scores.mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        opt_g.zero_grad()
        loss_g = -self.discriminator(self(noise)).mean()
        self.manual_backward(loss_g)
        opt_g.step()
        self.saw(loss, loss_g)


class Direct(Accumulating):
    """A backward that the strategy doesn't see."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[1]).mean().backward()


BY_HAND = {model.__name__: model for model in (Accumulating, SharedGraph, GradientPenalty, Direct)}


def fit(model: str, strategy: str = "single", options: dict[str, Any] | None = None, **given: Any) -> Report:
    torch.set_default_dtype(torch.float64)
    module = BY_HAND[model]()
    trainer = make_trainer(strategy, [], options or {}, max_epochs=4, **given)
    layout = getattr(trainer.strategy, "layout", None)
    replicas = layout.size("data") if layout is not None else 1
    share = trainer.distributed_sampler_kwargs if replicas > 1 else None
    trainer.fit(module, module.loader(share, BATCH // replicas))
    report = collect(Report(), trainer, module)
    report.losses = [value for values in module.seen for value in values]
    return report
