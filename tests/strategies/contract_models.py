"""The models of the contract: small, unlike each other, none with a thought of layouts.

Numbers are equal to the last digits only where they are well-conditioned: float64, no activation with a kink, and Adam
with an eps that doesn't blow up rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.models import Rows

SAMPLES, BATCH = 22, 8  # the last batch has 6
WIDTH, TOKENS, LENGTH, CLASSES = 12, 17, 10, 5
IGNORED = -100
# Of each sample, how many labels count. Replicas average their means, as under DDP, so all replicas of a batch have
# equally many, dealt out in turn or in halves; microbatches haven't.
COUNTED = (3, 3, 7, 7, 2, 2, 8, 8, 9, 9, 1, 1, 4, 4, 6, 6, 2, 2, 9, 9, 2, 2)


def samples() -> list[dict[str, Tensor]]:
    """The same for all models; each takes of it what it needs."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
    counts = torch.arange(LENGTH) < torch.tensor(COUNTED).unsqueeze(1)
    columns = {
        "x": torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64),
        "class": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "tokens": tokens,
        "labels": tokens.roll(-1, 1).masked_fill(~counts, IGNORED),
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(SAMPLES)]


def loader(share: dict[str, int] | None) -> DataLoader[Any]:
    """Batches of eight samples over all replicas. ``share``: which of them these are, as DistributedSampler says it."""
    rows = Rows(samples())
    if not share:
        return DataLoader(rows, BATCH)
    return DataLoader(rows, BATCH // share["num_replicas"], sampler=DistributedSampler(rows, **share, shuffle=False))


class RecordingAdamW(torch.optim.AdamW):
    """Keeps each gradient that it was given where every layout saves tensors whole and by name: in its state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state[f"gradient_{int(state['step'])}"] = parameter.grad.detach().clone()
        return loss


class Model(L.LightningModule):
    """Seeded weights, and a learning rate that changes with every second update.

    Args:
        groups: matrices decay, with a learning rate of their own; vectors don't; every third parameter is frozen.
        early: the optimizer is made with the module.
    """

    def __init__(self, groups: bool = False, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.groups = groups
        self.build()
        if groups:
            for parameter in list(self.parameters())[1::3]:
                parameter.requires_grad_(False)
        self.early = self.make_optimizers() if early else None

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def optimizer_of(self, *parameters: nn.Parameter) -> RecordingAdamW:
        if not self.groups:
            return RecordingAdamW(parameters, lr=1e-2, eps=1e-4)
        decays = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3, "lr": 2e-2}
        others = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
        return RecordingAdamW([decays, others], lr=1e-2, eps=1e-4)

    def configure_optimizers(self) -> Any:
        return self.early or self.make_optimizers()

    def make_optimizers(self) -> Any:
        optimizer = self.optimizer_of(*self.parameters())
        schedule = {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def layers(*widths: int) -> Iterator[nn.Module]:
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        yield from (nn.Linear(before, after), nn.Tanh())


class Perceptron(Model):
    """Layers in a row. Returns a dictionary, and logs in steps and hooks: numbers, a metric, the largest value."""

    def build(self) -> None:
        self.net = nn.Sequential(*layers(WIDTH, 16, 16, 16), nn.Linear(16, CLASSES))
        self.accuracy, self.seen = MulticlassAccuracy(CLASSES, average="micro"), SumMetric()

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["x"])
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(logits, batch["class"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.seen.update(len(batch["x"]))
        self.log("seen", self.seen, on_step=False, on_epoch=True)  # each sample once, on whatever ranks
        return F.cross_entropy(logits, batch["class"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"train_loss": loss, "double": 2 * loss}, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "rows": len(batch["x"])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch", float(batch_idx + 1), on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch), sync_dist=True)


class Probe(Perceptron):
    """Only its head is trained, so the first stages only run forwards."""

    def build(self) -> None:
        super().build()
        self.net[:-1].requires_grad_(False)


class Block(nn.Module):
    """Causal attention, and two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Language(Model):
    """A transformer whose head is its embedding; a mean over the tokens whose labels count."""

    def build(self) -> None:
        self.embedding = nn.Embedding(TOKENS, 8)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: Any) -> Tensor:
        hidden = self.embedding(batch["tokens"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class Skipping(Model):
    """What the first layers return goes to the last ones, as in a U-Net."""

    def build(self) -> None:
        self.down = nn.ModuleList(nn.Linear(a, b) for a, b in ((WIDTH, 10), (10, 8), (8, 6)))
        self.up = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 8), (16, 10), (20, WIDTH)))

    def loss(self, batch: Any) -> Tensor:
        first = torch.tanh(self.down[0](batch["x"]))
        second = torch.tanh(self.down[1](first))
        middle = torch.tanh(self.up[0](torch.tanh(self.down[2](second))))
        last = torch.tanh(self.up[1](torch.cat([middle, second], 1)))
        return F.mse_loss(self.up[2](torch.cat([last, first], 1)), batch["x"].sin())


class TwoTerms(Model):
    """An autoencoder that is variational, but for the noise: the second term is of what the first layers return. It
    takes two views of a batch, one after the other, and a third one without gradients, which is a target."""

    def build(self) -> None:
        self.encoder = nn.Sequential(*layers(WIDTH, 16, 8))
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)
        self.decoder = nn.Sequential(*layers(4, 8, 16), nn.Linear(16, WIDTH))

    def rebuilt(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        rebuilt = self.decoder(mean + torch.exp(spread / 2) * torch.linspace(-1, 1, 4))
        return rebuilt, (mean.pow(2) + spread.exp() - spread - 1).mean()

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        rebuilt, divergence = self.rebuilt(x)
        self.log("divergence", divergence.detach(), sync_dist=True)
        other, other_divergence = self.rebuilt(x.cos())
        with torch.no_grad():
            target, _ = self.rebuilt(x.tanh())
        return F.mse_loss(rebuilt, x) + F.mse_loss(other, target) + 0.1 * (divergence + other_divergence)


class Standardised(nn.Module):
    """Its buffers are read again where the step undoes what it does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("deviation", torch.rand(width) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation

    def inverse(self, x: Tensor) -> Tensor:
        return x * self.deviation + self.mean


class Loose(Model):
    """Parameters that belong to no layer: one before the first, one after the last, one that is never used. Buffers of
    the first layer that the step reads after the last."""

    def build(self) -> None:
        self.embedding = nn.Embedding(TOKENS, 12)
        self.position = nn.Parameter(torch.randn(LENGTH, 12) * 0.1)
        self.unused = nn.Parameter(torch.ones(3))
        self.temperature = nn.Parameter(torch.ones(()))
        self.standardised = Standardised(12)
        self.mlps = nn.ModuleList(nn.Sequential(*layers(12, 24, 12)) for _ in range(3))
        self.head = nn.Linear(12, TOKENS)

    def loss(self, batch: Any) -> Tensor:
        hidden = self.standardised(self.embedding(batch["tokens"])) + self.position
        for mlp in self.mlps:
            hidden = 0.9 * hidden + mlp(hidden)
        logits = self.head(self.standardised.inverse(hidden)) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


class TwoOptimizers(Model):
    """A GAN: two networks that take turns, optimized by hand; a parameter in neither."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(*layers(4, 8, 8), nn.Linear(8, WIDTH))
        self.discriminator = nn.Sequential(*layers(WIDTH, 8, 8), nn.Linear(8, 1))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def configure_tensor_parallel(self) -> dict[str, str]:
        """With manual optimization, a plan can't be found in the first step."""
        styles = {"0": "column", "2": "row"}
        return {f"{net}.{i}": style for net in ("generator", "discriminator") for i, style in styles.items()}

    def judged(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x[:, :4]) + self.shift

    def loss(self, batch: Any) -> Tensor:
        return self.judged(self(batch["x"]), True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        fooled = self.loss(batch)
        first.zero_grad()
        self.manual_backward(fooled)
        self.clip_gradients(first, gradient_clip_val=0.2)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        made = self(batch["x"]).detach()
        caught = (self.judged(batch["x"], True) + self.judged(made, False)) / 2
        second.zero_grad()
        self.manual_backward(caught)
        second.step()
        self.untoggle_optimizer(second)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log_dict({"fooled": fooled, "caught": caught}, on_step=True, on_epoch=True, sync_dist=True)

    def make_optimizers(self) -> Any:
        first = self.optimizer_of(*self.generator.parameters(), self.shift)
        optimizers = [first, self.optimizer_of(*self.discriminator.parameters())]
        return optimizers, [StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


MODELS = {kind.__name__: kind for kind in (Perceptron, Probe, Language, Skipping, TwoTerms, Loose, TwoOptimizers)}
