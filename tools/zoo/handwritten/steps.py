"""Steps that read what layers have kept, or parameters; and several losses of one model."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.entry import Nature
from tools.zoo.handwritten.parts import WIDTH, Block, Stack, blocks, head, whole
from tools.zoo.modules import CLASSES, Trained


class DeepSupervision(Trained):
    """A loss after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.heads = blocks(), nn.ModuleList(head() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        total = x.new_zeros(())
        for block, classify in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            total = total + F.cross_entropy(classify(x), labels)
        return total / 4


class MultiTask(Trained):
    """One trunk, three heads in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*blocks())
        self.heads = nn.ModuleDict({"class": head(), "value": nn.Linear(WIDTH, 1), "copy": nn.Linear(WIDTH, WIDTH)})

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        h = self.trunk(x)
        out = {name: layer(h) for name, layer in self.heads.items()}
        losses = {
            "class": F.cross_entropy(out["class"], labels),
            "value": F.mse_loss(out["value"].squeeze(1), labels.to(x.dtype)),
            "copy": F.l1_loss(out["copy"], x),
        }
        self.log_dict(losses)
        return torch.stack(list(losses.values())).sum()


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


class Sparse(nn.Module):
    """A block that keeps how much of it is zero, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.zeros = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layer(x))
        self.zeros = (y == 0).to(y.dtype).mean().item()
        return x + y


class Sparsity(Stack):
    """The loss has such a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Sparse()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[0].zeros


class Measured(nn.Module):
    """A block with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.size = torchmetrics.MeanMetric(nan_strategy="disable")

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.size.update(y.detach().abs().mean(), weight=len(x))
        return x + y.tanh()


class MetricInside(Stack):
    """A metric in the first block, logged by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Measured()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("size", self.blocks[0].size, on_step=False, on_epoch=True)
        return loss


class OwnGenerator(Stack):
    """Noise from a generator of the module's own, before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return super().loss((x + 0.1 * noise, labels))


class OwnGeneratorTwice(OwnGenerator):
    """And once more in the loss, where earlier stages have left."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + 0.1 * torch.rand((), generator=self.generator, dtype=loss.dtype))


class InPlaceViews(Stack):
    """Two views of one layer's output, one of which is changed in place."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.block(x)
            return y, y[:, : WIDTH // 2]

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.Pair()

    def forward(self, x: Tensor) -> Tensor:
        x, half = self.blocks[0](x)
        half.mul_(2)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x)


ENTRIES = (
    whole("hook in the loss", Hooked),
    whole("hook inside layers, in the loss", HookedInside),
    whole("self.last = h", LastKept),
    whole("pre-hook", ScaledInputs),
    whole("buffer in the loss", Counting),
    whole("l2 penalty", Penalised),
    whole("penalty on one layer", PenalisedHead),
    whole("logged norms", Logged),
    whole("learned loss weights", Uncertain),
    whole("criterion with weights", Prototypes),
    whole("dictionary from the step", Smoothed),
    whole("metrics", Metrics),
    whole("metric inside a layer", MetricInside),
    whole("number of a layer in the loss", Sparsity),
    whole("generator of its own", OwnGenerator, by_nature=Nature.DRAWS),
    whole("generator of its own, twice", OwnGeneratorTwice, by_nature=Nature.DRAWS),
    whole("views changed in place", InPlaceViews),
    whole("deep supervision", DeepSupervision),
    whole("multi-task", MultiTask),
)
