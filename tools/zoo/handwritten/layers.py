"""Kinds of layers: recurrences, experts, normalisations, and some that write into fresh tensors or look at values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tools.zoo.entry import Nature
from tools.zoo.handwritten.parts import WIDTH, Block, blocks, head, language, mlp, net, sequences, texts, whole
from tools.zoo.modules import CLASSES, LENGTH, VOCABULARY, Trained, classes


class Dropout(nn.Dropout):
    def __init__(self, width: int) -> None:
        super().__init__(0.2)


class BatchNormInEvalMode(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


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
    last = nn.Linear(WIDTH * LENGTH, CLASSES)
    return nn.Sequential(*(kind() for _ in range(4)), nn.LayerNorm(WIDTH), nn.Flatten(), last)


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


def graph() -> dict[str, Tensor]:
    return {"nodes": torch.randn(8, 6, WIDTH), "edges": torch.rand(8, 6, 6), "labels": classes()}


ENTRIES = (
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
)
