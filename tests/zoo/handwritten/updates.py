"""Teachers, optimizers, and hooks around the update."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.handwritten.parts import WIDTH, Block, Stack, blocks, head, whole
from tests.zoo.modules import Trained


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


class Momentum(MeanTeacher):
    """The teacher follows at the beginning of each step, as in BYOL and MoCo."""

    def loss(self, batch: Any) -> Tensor:
        self.follow()
        return super().loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def follow(self) -> None:
        students = [*self.blocks.parameters(), *self.head.parameters()]
        for mean, parameter in zip(self.teacher.parameters(), students, strict=True):
            mean.data = mean.data * 0.9 + parameter.data * 0.1


class FollowsAtOnce(Momentum):
    """All of the teacher's parameters follow in one call."""

    @torch.no_grad()
    def follow(self) -> None:
        students = [*self.blocks.parameters(), *self.head.parameters()]
        torch._foreach_lerp_(list(self.teacher.parameters()), students, 0.1)


class FollowsLate(Momentum):
    """The teacher follows at the end of each step."""

    def loss(self, batch: Any) -> Tensor:
        loss = MeanTeacher.loss(self, batch)
        with torch.no_grad():
            self.follow()
        return loss


class FineTuned(Stack):
    """The first two blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


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


ENTRIES = (
    whole("distilled", Distilled),
    whole("mean teacher", MeanTeacher),
    whole("momentum encoder", Momentum),
    whole("momentum encoder, at once", FollowsAtOnce),
    whole("momentum encoder, late", FollowsLate),
    whole("frozen blocks", FineTuned),
    whole("parameter groups", Grouped),
    whole("adagrad", Adagrad),
    whole("rmsprop", RMSprop),
    whole("scaled gradients", ScaledGradients),
    whole("clipping of its own", Clipped),
    whole("manual optimization", Manual),
    whole("gan", GAN),
)
