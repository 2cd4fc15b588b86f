"""Modules whose loss is a mean over something else than samples: labels, or a mask. Most ways to write such a loss are
in spellings.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.models import LENGTH, SAMPLES, TOKENS, Base

IGNORED = -100


def tokens() -> Tensor:
    return torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))


def chosen(share: float = 0.5) -> Tensor:
    """Which labels count: another number in each sample, and none in some."""
    generator = torch.Generator().manual_seed(5)
    share_of_each = torch.linspace(0, share, SAMPLES)[torch.randperm(SAMPLES, generator=generator)]
    return torch.rand(SAMPLES, LENGTH, generator=generator) < share_of_each.unsqueeze(1)


def rows(**columns: Tensor) -> list[Any]:
    return [{name: column[i] for name, column in columns.items()} for i in range(SAMPLES)]


class Tokens(Base):
    """A small model of tokens; its losses are written by hand."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, TOKENS)

    def logits(self, batch: Any) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(batch["input_ids"])))
        return logits

    def loss(self, batch: Any) -> Tensor:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        size, length, classes = logits.shape
        return F.cross_entropy(logits.reshape(size * length, classes), labels.reshape(size * length))

    @classmethod
    def samples(cls) -> list[Any]:
        return rows(input_ids=tokens(), labels=tokens().masked_fill(~chosen(), IGNORED))


class Selected(Tokens):
    """Only what counts is picked; the second loss by another choice."""

    def loss(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        counts = labels != IGNORED
        logits = self.logits(batch)
        small = batch["input_ids"] < 9
        return F.cross_entropy(logits[counts], labels[counts]) + logits.pow(2).mean(-1)[small].mean()


def labels_that_count(batch: Any) -> Tensor:
    """What the loss of `Tokens` averages over."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


COUNTED = {model.__name__: model for model in (Tokens, Selected)}
