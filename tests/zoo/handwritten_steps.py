"""Modules written by hand, each with something in its training step, its optimizers or its hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, Nature
from tests.zoo.handwritten import WIDTH, Block, blocks, head, language, rows
from tests.zoo.modules import CLASSES, LENGTH, VOCABULARY, Trained, tokens


class Stack(Trained):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        return F.cross_entropy(self(x), labels)


# -- values that don't pass through returns ----------------------------------------------------------------------


class Hooked(Stack):
    """A forward hook on every block keeps its output for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.kept.clear()
        return super().loss(batch) + 0.1 * torch.stack([output.square().mean() for output in self.kept]).sum()


class HookedInside(Stack):
    """As `Hooked`, on a module inside each block."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.kept.clear()
        return super().loss(batch) + 0.1 * torch.stack([output.square().mean() for output in self.kept]).sum()


class Remembering(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class LastKept(Stack):
    """``self.last = h`` in the blocks, read by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * torch.stack([block.last.square().mean() for block in self.blocks]).sum()


class ScaledInputs(Stack):
    """A forward pre-hook that changes what a block gets."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))


class Counting(Stack):
    """A buffer that the loss reads, and each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / (1 + 0.1 * self.seen)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1


# -- parameters in the step --------------------------------------------------------------------------------------


class Penalised(Stack):
    """An L2 penalty over all parameters."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * torch.stack([p.square().sum() for p in self.parameters()]).sum()


class PenalisedHead(Stack):
    """An L1 penalty on the first block's weight."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * self.blocks[0].up.weight.abs().sum()


class Logged(Stack):
    """Norms of weights in the log."""

    def loss(self, batch: Any) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.log(f"norm_{number}", block.up.weight.detach().norm())
        return super().loss(batch)


class Uncertain(Stack):
    """Learned weights of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        out = self(x)
        losses = torch.stack([F.cross_entropy(out, labels), out.square().mean()])
        return (losses * (-self.log_variances).exp() + self.log_variances).sum()


class Prototypes(Stack):
    """The criterion has weights: distances to a prototype of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.Embedding(CLASSES, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        return (self(x) - self.criterion(labels)).square().sum(-1).mean()


# -- losses ------------------------------------------------------------------------------------------------------


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


class Smoothed(Stack):
    """The model as a dictionary of results; a step that returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, labels = batch
        out = self(x)
        return {"loss": F.cross_entropy(out, labels, label_smoothing=0.1), "logits": out.detach(), "labels": labels}


class Metrics(Stack):
    """Metrics as submodules, and many values in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        out = self(x)
        self.accuracy((out.argmax(-1) == labels).to(x.dtype))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"mean": out.mean(), "max": out.max()}, prog_bar=True)
        return F.cross_entropy(out, labels)


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


# -- teachers ----------------------------------------------------------------------------------------------------


class Distilled(Stack):
    """A frozen teacher, larger than the student, and registered first."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.head
        self.teacher = nn.Sequential(*blocks(6), head()).requires_grad_(False)
        self.blocks, self.head = blocks(), head()

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        out = self(x)
        return F.cross_entropy(out, labels) + F.cross_entropy(out, target)


class MeanTeacher(Stack):
    """The teacher is a moving average of the student, updated after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(*self.blocks, self.head)).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        with torch.no_grad():
            target = self.teacher(x)
        out = self(x)
        return F.cross_entropy(out, labels) + F.mse_loss(out, target)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            students = [*self.blocks.parameters(), *self.head.parameters()]
            for mean, parameter in zip(self.teacher.parameters(), students, strict=True):
                mean.lerp_(parameter, 0.1)


class FineTuned(Stack):
    """The first two blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


# -- optimizers --------------------------------------------------------------------------------------------------


class Grouped(Stack):
    """AdamW: no decay for vectors, a rate for each block, and a schedule."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in block.parameters() if p.dim() > 1], "lr": 1e-3 * (number + 1), "weight_decay": 0.1}
            for number, block in enumerate(self.blocks)
        ]
        vectors = [p for p in self.blocks.parameters() if p.dim() == 1]
        groups += [{"params": vectors, "weight_decay": 0.0}, {"params": list(self.head.parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Adagrad(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2, eps=1e-4)


class RMSprop(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, eps=1e-3, momentum=0.9)


class ScaledGradients(Stack):
    """A hook of the module changes gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Clipped(Stack):
    """Clipping of one's own."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Manual(Stack):
    """Manual optimization, one optimizer, a step of its own."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class GAN(Trained):
    """Two optimizers; the noise comes with the batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, noise = batch[0], batch[0][:, :4]
        of_generator, of_discriminator = self.optimizers()
        made = self.generator(noise)
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(made.detach())).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        against = F.softplus(-self.discriminator(made)).mean()
        of_generator.zero_grad()
        self.manual_backward(against)
        of_generator.step()
        return {"loss": (loss + against).detach()}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.discriminator)]


def ignored() -> dict[str, Tensor]:
    labels, lengths = tokens(), torch.randint(2, LENGTH + 1, (8, 1))
    return {"ids": tokens(), "labels": labels.where(torch.arange(LENGTH) < lengths, -100)}


def step(name: str, module: Any, by_nature: Nature | None = None, batch: Any = rows) -> Entry:
    return Entry(name, "by hand", module, batch, by_nature=by_nature)


ENTRIES = (
    step("hook in the loss", Hooked),
    step("hook inside layers, in the loss", HookedInside),
    step("self.last = h", LastKept),
    step("pre-hook", ScaledInputs),
    step("buffer in the loss", Counting),
    step("l2 penalty", Penalised),
    step("penalty on one layer", PenalisedHead),
    step("logged norms", Logged),
    step("learned loss weights", Uncertain),
    step("criterion with weights", Prototypes),
    step("gradient penalty", GradientPenalty),
    step("adversarial examples", Adversarial),
    step("in-batch negatives", InBatch, Nature.SAMPLES),
    step("vicreg", Decorrelated, Nature.SAMPLES),
    step("summed loss", Summed, Nature.SUM),
    step("class weights", ClassWeights, Nature.SUM),
    step("ignored labels", IgnoredLabels, Nature.LABELS, ignored),
    step("dictionary from the step", Smoothed),
    step("metrics", Metrics),
    step("mixup", Mixup, Nature.DRAWS),
    step("reinforce", Sampled, Nature.DRAWS),
    step("vae", VAE, Nature.DRAWS),
    step("vae, noise of the batch", lambda: VAE(noise=False)),
    step("denoising", Denoising, Nature.DRAWS),
    step("domain-adversarial", DomainAdversarial),
    step("stop gradient", StopGradient),
    step("distilled", Distilled),
    step("mean teacher", MeanTeacher),
    step("frozen blocks", FineTuned),
    step("parameter groups", Grouped),
    step("adagrad", Adagrad),
    step("rmsprop", RMSprop),
    step("scaled gradients", ScaledGradients),
    step("clipping of its own", Clipped),
    step("manual optimization", Manual),
    step("gan", GAN),
)
