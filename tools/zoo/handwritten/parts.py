"""What modules written by hand are made of: blocks, small networks, and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import CLASSES, LENGTH, Classifier, Trained, classes, images, tokens

WIDTH = 16


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), classes()


def texts() -> tuple[Tensor, Tensor]:
    return tokens(), classes()


def pictures() -> tuple[Tensor, Tensor]:
    return images(16), classes()


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(8, LENGTH, WIDTH), classes()


def language() -> tuple[Tensor, Tensor]:
    return tokens(), tokens()


class Block(nn.Module):
    """Norm, two linear layers, and a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def blocks(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def head() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


def mlp(*between: type[nn.Module]) -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind(WIDTH) for kind in between), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*layers, head())


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


def net(name: str, make: Any, batch: Any = rows, by_nature: Nature | None = None, layers: int = 4) -> Entry:
    """A classifier."""
    return Entry(name, "by hand", lambda: Classifier(make()), batch, layers, by_nature)


def whole(name: str, module: Any, batch: Any = rows, by_nature: Nature | None = None, layers: int = 4) -> Entry:
    """A LightningModule with a loss of its own."""
    return Entry(name, "by hand", module, batch, layers, by_nature)
