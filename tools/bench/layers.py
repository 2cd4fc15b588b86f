"""Models that are measured, and the LightningModule that trains any of them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: tuple[float, float]) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds[1]
        time.sleep(seconds[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None  # that of a mean is one number, expanded


class SleepingLayer(nn.Module):
    """Takes ``forward`` and ``backward`` seconds and no CPU, so that two cores are enough for many stages. Half of the
    backward is the gradient of its input, half that of the weight of a small matmul. The first layer takes as long as
    the others: a shift before it has a gradient."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.shift = nn.Parameter(torch.zeros(1))
        self._seconds = (forward, backward / 2)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x + self.shift
        slept: Tensor = _Sleep.apply(x, self._seconds)  # type: ignore[no-untyped-call]
        weight = self.weight * 1  # of the parameter, or of what an asynchronous pipeline reads in its place
        if weight.requires_grad:
            weight.register_hook(self._sleep)
        return slept + nn.functional.linear(slept[..., :1, :4], weight).sum()

    def _sleep(self, gradient: Tensor) -> None:
        time.sleep(self._seconds[1])


def sleeping(layers: int, forward: float, backward: float) -> nn.Sequential:
    return nn.Sequential(*(SleepingLayer(forward, backward) for _ in range(layers)))


def blocks(count: int, width: int) -> nn.Sequential:
    """Transformer blocks, the same numbers in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(count)
        )
    )


class LlamaBlock(nn.Module):
    """A block of Llama (arXiv:2302.13971): norms by the root mean square, rotary positions, a gated MLP, no biases.

    Shapes: [batch, time, width] -> the same.

    Args:
        width: of the residual stream.
        heads: of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        inner = 8 * width // 3 // 64 * 64  # three matrices have as many entries as two of 4 x width, about
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        added: Tensor = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return x + added


def _rotated(x: Tensor) -> Tensor:
    """Halves of each head turned by an angle that grows with the position; [batch, heads, time, size]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000 ** -(torch.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def mixed(device: str) -> torch.autocast:
    """As ``precision="bf16-mixed"`` has it in Lightning, where no cast of a weight is kept for the next use."""
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def loss_of(output: Tensor) -> Tensor:
    return output.mean()


def masked_loss_of(output: Tensor) -> Tensor:
    """A mean over two in three positions of the last dimension, as over the labels of a language model that count."""
    mask = torch.arange(output.shape[-1], device=output.device) % 3 > 0
    return (output.mean(-2) * mask).sum() / (mask.sum() * output[..., 0, 0].numel())


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class Trained(L.LightningModule):
    def __init__(
        self, layers: nn.Sequential, optimizer: MakeOptimizer, log: bool, loss: Callable[[Tensor], Tensor] = loss_of
    ) -> None:
        super().__init__()
        self.layers = layers
        self._loss = loss
        self._make_optimizer = optimizer
        self._log = log

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self._loss(self.layers(batch))
        if self._log:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self._make_optimizer(self.parameters())


class Clock(L.Callback):
    """When each batch of training or of predictions was done on this rank."""

    reads_weights = False

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_predict_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def quiet() -> None:
    """Leave out what Lightning says of each Trainer: a contestant makes one a round."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")


def fit(
    layers: nn.Sequential,
    strategy: Strategy | str,
    batch: Tensor,
    batches: int,
    optimizer: MakeOptimizer = sgd,
    log: bool = False,
    directory: str | None = None,
    loss: Callable[[Tensor], Tensor] = loss_of,
    clip: float | None = None,
) -> list[float]:
    """Train on the same batch over and over: seconds between the ends of consecutive batches on this rank. Pictures,
    if the strategy draws any, go into ``directory``. ``clip`` is the Trainer's ``gradient_clip_val``."""
    quiet()
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        default_root_dir=directory,
        gradient_clip_val=clip,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Trained(layers, optimizer, log, loss), DataLoader(_Repeated(batch, batches), batch_size=None))  # type: ignore[arg-type]
    return intervals(clock.ends)


def intervals(ends: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]


class _Repeated(Sequence[Tensor]):
    def __init__(self, batch: Tensor, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._batch
