"""Losses: of gradients, of a batch's samples together, of labels in unequal numbers, and with random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Nature
from tests.zoo.handwritten.parts import WIDTH, Block, Stack, blocks, whole
from tests.zoo.modules import CLASSES, LENGTH, VOCABULARY, Trained, tokens


class GradientPenalty(Stack):
    """The gradient of the output with respect to the input is part of the loss."""

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, labels) + 0.1 * gradient.square().sum(-1).mean()


class Adversarial(Stack):
    """A step of the inputs along their gradient, then the loss there."""

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(x), labels, reduction="sum"), x)
        return F.cross_entropy(self((x + 0.1 * gradient.sign()).detach()), labels)


class InBatch(Stack):
    """InfoNCE."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        a, b = F.normalize(self(x), dim=-1), F.normalize(self(x + 0.1), dim=-1)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


class Decorrelated(Stack):
    """VICReg's variance and covariance, of one call."""

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        centred = out - out.mean(0)
        covariance = centred.T @ centred / len(out)
        return F.relu(1 - centred.var(0).add(1e-4).sqrt()).mean() + covariance.fill_diagonal_(0).square().sum()


class Summed(Stack):
    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        return 0.1 * F.cross_entropy(self(x), labels, reduction="sum")


class ClassWeights(Stack):
    """Torch divides by the sum of the labels' weights."""

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        return F.cross_entropy(self(x), labels, weight=torch.arange(1.0, CLASSES + 1))


class IgnoredLabels(Trained):
    """A language model with labels that are ignored, in unequal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(VOCABULARY, WIDTH), blocks(), nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Mixup(Stack):
    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        share = torch.rand(len(x), 1)
        targets = F.one_hot(labels, CLASSES).to(x.dtype)
        mixed = share * targets + (1 - share) * targets.flip(0)
        return F.cross_entropy(self(share * x + (1 - share) * x.flip(0)), mixed)


class Sampled(Stack):
    """REINFORCE: the action is drawn from the output."""

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        policy = torch.distributions.Categorical(logits=self(x))
        action = policy.sample()
        return -(policy.log_prob(action) * (action == labels)).mean()


class VAE(Trained):
    """The noise is drawn between encoder and decoder."""

    def __init__(self, noise: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
        self.decoder = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block())
        self.noise = noise

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean) if self.noise else x[:, :4]
        divergence = (log_variance.exp() + mean.square() - 1 - log_variance).mean()
        return F.mse_loss(self.decoder(mean + (0.5 * log_variance).exp() * noise), x) + 0.1 * divergence


class Denoising(Stack):
    """Noise before the layers, and again in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        noise = torch.randn_like(x)
        out = self(x + noise)
        return F.mse_loss(out, noise) + 0.1 * (out * torch.randn_like(out)).mean().square()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class DomainAdversarial(Stack):
    """A custom autograd function between trunk and a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels) + F.cross_entropy(self.domain(Reversal.apply(x)), labels % 2)


class StopGradient(Stack):
    """SimSiam without its BatchNorm: one side of a pair is detached."""

    def loss(self, batch: Any) -> Tensor:
        a, b = self(batch[0]), self(batch[0].flip(-1))
        return -F.cosine_similarity(a, b.detach(), dim=-1).mean() - F.cosine_similarity(b, a.detach(), dim=-1).mean()


def ignored() -> dict[str, Tensor]:
    labels, lengths = tokens(), torch.randint(2, LENGTH + 1, (8, 1))
    return {"ids": tokens(), "labels": labels.where(torch.arange(LENGTH) < lengths, -100)}


ENTRIES = (
    whole("gradient penalty", GradientPenalty),
    whole("adversarial examples", Adversarial),
    whole("in-batch negatives", InBatch, by_nature=Nature.SAMPLES),
    whole("vicreg", Decorrelated, by_nature=Nature.SAMPLES),
    whole("summed loss", Summed, by_nature=Nature.SUM),
    whole("class weights", ClassWeights, by_nature=Nature.SUM),
    whole("ignored labels", IgnoredLabels, ignored, Nature.LABELS),
    whole("mixup", Mixup, by_nature=Nature.DRAWS),
    whole("reinforce", Sampled, by_nature=Nature.DRAWS),
    whole("vae", VAE, by_nature=Nature.DRAWS),
    whole("vae, noise of the batch", lambda: VAE(noise=False)),
    whole("denoising", Denoising, by_nature=Nature.DRAWS),
    whole("domain-adversarial", DomainAdversarial),
    whole("stop gradient", StopGradient),
)
