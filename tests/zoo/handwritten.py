"""Modules written by hand, each with something in its structure that a strategy could trip over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo.entry import Entry, Nature
from tests.zoo.modules import CLASSES, LENGTH, VOCABULARY, Classifier, Trained, classes, images, tokens

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


class Dropout(nn.Dropout):
    def __init__(self, width: int) -> None:
        super().__init__(0.2)


class BatchNormInEvalMode(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


# -- containers and order ----------------------------------------------------------------------------------------


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


# -- what passes between layers ----------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    total: Tensor
    depth: int


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


class InPlace(nn.Module):
    """Activations and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(4)))
        self.head = head()

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        for layer in self.layers:
            h = layer(h)
            h += x
            h.mul_(0.5)
        return self.head(h)


# -- layers that share or recur ----------------------------------------------------------------------------------


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
        self.attentions, self.scales = nn.ModuleList(Attention() for _ in range(4)), nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(4)])
        self.scale, self.head = nn.Parameter(torch.ones(())), head()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.positions
        for attention, scale in zip(self.attentions, self.scales, strict=True):
            x = attention(x) * scale
        return self.head(x[:, 0]) * self.scale


# -- recurrences and others --------------------------------------------------------------------------------------


class Translator(Trained):
    """Two LSTMs: the decoder begins with the encoder's state."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        source, target = batch
        _, state = self.encoder(self.source(source))
        out, _ = self.decoder(self.target(target[:, :-1]), state)
        return F.cross_entropy(self.head(out).flatten(0, 1), target[:, 1:].flatten())


class Tagger(nn.Module):
    """GRUs in both directions, one above the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True) for _ in range(3))
        self.head = head()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x.mean(1))


class TokenByToken(nn.Module):
    """An LSTM cell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH), head()

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), WIDTH)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(self.norm(h))


class Experts(nn.Module):
    """The tokens of each expert, found by ``nonzero``, and put back by ``index_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows_, ranks = (chosen == number).nonzero(as_tuple=True)
            if rows_.numel():
                out.index_add_(0, rows_, expert(flat[rows_]) * weights[rows_, ranks, None])
        return x + out.view_as(x)


class SoftExperts(nn.Module):
    """All experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1)


def stacked(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(4)), nn.LayerNorm(WIDTH), nn.Flatten(), nn.Linear(WIDTH * LENGTH, CLASSES))


class Scattered(nn.Module):
    """Outputs are written into a fresh tensor, a part at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 4, WIDTH)
        for i, block in enumerate(self.blocks):
            x = block(x)
            out[:, i] = x
        return self.head(out.flatten(1))


class Inside(nn.Module):
    """A layer that writes into a fresh tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, ::2] = self.even(x[:, ::2])
        out[:, 1::2] = self.odd(x[:, 1::2])
        return torch.tanh(out)


class Sorted(nn.Module):
    """A layer whose code depends on values, but not the shape of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 100:
            x = x / x.abs().max()
        return self.block(x)


class Encoder(nn.Module):
    """torch's own transformer, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), head()

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids), mask=mask, is_causal=True)[:, -1])


class Fourier(nn.Module):
    """Complex numbers between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x, dim=1)
        for block in self.blocks:
            spectrum = torch.complex(block(spectrum.real), spectrum.imag)
        return self.head(spectrum.abs().mean(1))


class Graph(Trained):
    """Messages along a graph that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = blocks(), head()

    def loss(self, batch: Any) -> Tensor:
        x, adjacency = batch["nodes"], batch["edges"]
        adjacency = adjacency / adjacency.sum(-1, keepdim=True)
        for layer in self.layers:
            x = layer(adjacency @ x)
        return F.cross_entropy(self.head(x.mean(1)), batch["labels"])


class Checkpointed(nn.Module):
    """torch.utils.checkpoint by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def weight_normed() -> nn.Sequential:
    layers = (nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*layers, head())


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


def graph() -> dict[str, Tensor]:
    return {"nodes": torch.randn(8, 6, WIDTH), "edges": torch.rand(8, 6, 6), "labels": classes()}


def pair() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH), torch.rand(8) > 0.5


def triple() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def net(name: str, make: Any, batch: Any = rows, by_nature: Nature | None = None, layers: int = 4) -> Entry:
    """A classifier."""
    return Entry(name, "by hand", lambda: Classifier(make()), batch, layers, by_nature)


def whole(name: str, module: Any, batch: Any = rows, by_nature: Nature | None = None, layers: int = 4) -> Entry:
    """A LightningModule with a loss of its own."""
    return Entry(name, "by hand", module, batch, layers, by_nature)


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
    whole("deep supervision", DeepSupervision),
    whole("multi-task", MultiTask),
    net("in place", InPlace),
    net("recycled block", Recycled),
    net("two rounds", TwoRounds),
    net("listed twice", ListedTwice),
    net("shared dropout", lambda: SharedDropout(0.2), by_nature=Nature.DRAWS),
    whole("siamese", Siamese, pair),
    whole("triplet", Triplet, triple),
    whole("tied by hand", TiedByHand, language),
    whole("tied", Tied, language),
    net("loose parameters", LooseParameters, sequences),
    whole("lstm translator", Translator, language),
    net("gru tagger", Tagger, sequences, layers=3),
    net("lstm cell", TokenByToken, sequences, layers=2),
    net("experts by nonzero", lambda: stacked(Experts), sequences),
    net("soft experts", lambda: stacked(SoftExperts), sequences),
    net("outputs into a fresh tensor", Scattered),
    net("fresh tensor inside a layer", lambda: stacked(Inside), sequences),
    net("values decide inside a layer", lambda: nn.Sequential(*(Sorted() for _ in range(4)), head())),
    net("torch's transformer", Encoder, texts),
    net("complex numbers", Fourier, sequences),
    whole("graph", Graph, graph),
    net("checkpoint by hand", Checkpointed),
    net("weight norm", weight_normed),
    net("batch norm", lambda: mlp(nn.BatchNorm1d), by_nature=Nature.STATISTICS),
    net("batch norm in eval mode", lambda: mlp(BatchNormInEvalMode)),
    net("dropout", lambda: mlp(Dropout), by_nature=Nature.DRAWS),
    net("layer drop", LayerDrop, by_nature=Nature.DRAWS),
    whole("growing depth", GrowingDepth),
)
