"""Modules that run several times, and parameters that are used in several places or outside any module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Nature
from tests.zoo.handwritten.parts import WIDTH, Attention, Block, blocks, head, language, mlp, net, sequences, whole
from tests.zoo.modules import LENGTH, VOCABULARY, Trained


class Recycled(nn.Module):
    """One block, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), Block(), head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class TwoRounds(nn.Module):
    """All blocks, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class ListedTwice(nn.Module):
    """Two blocks that stand twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        first, second = Block(), Block()
        self.layers = nn.Sequential(first, second, first, second, head())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SharedDropout(nn.Module):
    """One dropout object for all layers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.blocks, self.dropout, self.head = blocks(), nn.Dropout(p), head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


class Siamese(Trained):
    """One encoder for both sides of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()

    def loss(self, batch: Any) -> Tensor:
        left, right, same = batch
        distance = (self.encoder(left) - self.encoder(right)).square().sum(-1)
        return torch.where(same, distance, F.relu(1 - distance)).mean()


class Triplet(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()

    def loss(self, batch: Any) -> Tensor:
        anchor, positive, negative = (self.encoder(part) for part in batch)
        return F.triplet_margin_loss(anchor, positive, negative)


class TiedByHand(Trained):
    """``F.linear(x, embedding.weight)``, at the other end of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm = nn.Embedding(VOCABULARY, WIDTH), blocks(), nn.LayerNorm(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1), labels.flatten())


class Tied(TiedByHand):
    """``head.weight = embedding.weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class LooseParameters(nn.Module):
    """Positions, a class token and a scale, which belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.randn(LENGTH + 1, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.attentions = nn.ModuleList(Attention() for _ in range(4))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(4)])
        self.scale, self.head = nn.Parameter(torch.ones(())), head()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.positions
        for attention, scale in zip(self.attentions, self.scales, strict=True):
            x = attention(x) * scale
        return self.head(x[:, 0]) * self.scale


def pair() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH), torch.rand(8) > 0.5


def triple() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH), torch.randn(8, WIDTH)


ENTRIES = (
    net("recycled block", Recycled),
    net("two rounds", TwoRounds),
    net("listed twice", ListedTwice),
    net("shared dropout", lambda: SharedDropout(0.2), by_nature=Nature.DRAWS),
    whole("siamese", Siamese, pair),
    whole("triplet", Triplet, triple),
    whole("tied by hand", TiedByHand, language),
    whole("tied", Tied, language),
    net("loose parameters", LooseParameters, sequences),
)
