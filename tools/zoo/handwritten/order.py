"""Containers, and the order in which modules are registered and called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.entry import Nature
from tools.zoo.handwritten.parts import WIDTH, Attention, Block, blocks, head, mlp, net, pictures, texts, whole
from tools.zoo.modules import CLASSES, LENGTH, VOCABULARY, Trained, classes, images


class LeNet(nn.Module):
    """Plain attributes, no container."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return x


class TakingTurns(nn.Module):
    """Attentions and MLPs in a list each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), head()
        self.attentions, self.mlps = nn.ModuleList(Attention() for _ in range(4)), blocks()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for attention, block in zip(self.attentions, self.mlps, strict=True):
            x = block(attention(x))
        return self.head(x.mean(1))


class OtherOrder(nn.Module):
    """The head is registered first, and the blocks run backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.blocks, self.stem = head(), blocks(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Named(nn.Module):
    """A ModuleDict whose entries are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"last": head(), "first": Block(), "second": Block(), "third": Block()})

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "second", "third", "last"):
            x = self.parts[name](x)
        return x


class Towers(nn.Module):
    """Two towers, whose layers don't follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], -1))


class Tabular(nn.Module):
    """An embedding for each column, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, 4) for _ in range(LENGTH))
        self.mlp = nn.Sequential(nn.Linear(4 * LENGTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), head())

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(torch.cat([embed(ids[:, i]) for i, embed in enumerate(self.embeddings)], -1))


class CalledByForward(nn.Module):
    """``layer.forward(x)`` instead of ``layer(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(x)


class UNet(nn.Module):
    """Skip connections from each level down to its level up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 16, 3, 2, 1)])
        self.up = nn.ModuleList([
            nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(24, 8, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2),
        ])  # fmt: skip
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = torch.relu(layer(x))
            x = torch.cat([x, skips.pop()], 1) if skips else x
        return self.head(x).mean((2, 3))


class Dense(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(4))
        self.head = nn.Linear(5 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], -1)
        return self.head(x)


class Highway(nn.Module):
    """Each layer also reads the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gates = blocks(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = head()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer, gate in zip(self.layers, self.gates, strict=True):
            g = torch.sigmoid(gate(x))
            h = g * layer(h) + (1 - g) * x
        return self.head(h)


class Dataclasses(nn.Module):
    """Layers hand on a dataclass."""

    class Layer(Block):
        def forward(self, state: State) -> State:  # type: ignore[override]
            hidden = super().forward(state.hidden)
            return State(hidden, state.total + hidden.mean(-1), state.depth + 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(4)), head()

    def forward(self, x: Tensor) -> Tensor:
        state = State(x, x.mean(-1), 0)
        for layer in self.layers:
            state = layer(state)
        return self.head(state.hidden) + state.total[:, None] / state.depth


@dataclass
class State:
    hidden: Tensor
    total: Tensor
    depth: int


class Dictionaries(nn.Module):
    """Layers change a dictionary and hand it on."""

    class Layer(Block):
        def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            data["x"] = super().forward(data["x"])
            return data

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(self.Layer() for _ in range(4))), head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers({"x": x, "first": x})["x"])


class InPlace(nn.Module):
    """Activations and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(4)))
        self.head = head()

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        for layer in self.layers:
            h = layer(h) + x
            h.mul_(0.5)
        return self.head(h)


class LayerDrop(nn.Module):
    """A block is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return self.head(x)


class GrowingDepth(Trained):
    """Later batches run more blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        for block in self.blocks[: batch_idx + 1]:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


ENTRIES = (
    net("plain attributes", LeNet, lambda: (images(28, 1), classes())),
    net("sequential", lambda: nn.Sequential(*blocks(), head())),
    net("sequential in sequential", mlp),
    net("layer.forward(x)", CalledByForward),
    net("two lists taking turns", TakingTurns, texts),
    net("registered in another order", OtherOrder),
    net("dictionary of modules", Named),
    net("u-net", UNet, pictures),
    net("dense connections", Dense),
    net("highway", Highway),
    net("two towers", Towers),
    net("table", Tabular, texts),
    net("dataclasses between layers", Dataclasses),
    net("dictionaries between layers", Dictionaries),
    net("in place", InPlace),
    net("layer drop", LayerDrop, by_nature=Nature.DRAWS),
    whole("growing depth", GrowingDepth),
)
