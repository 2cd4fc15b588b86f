"""Modules whose loss is a mean over something else than samples: labels, or a mask. Most ways to write such a loss are
in spellings.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.models import LENGTH, SAMPLES, TOKENS, Base, Llama

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


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' own, less its cast to float32."""
    labels = F.pad(labels, (0, 1), value=IGNORED)
    shifted = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.view(-1).to(logits.device), ignore_index=IGNORED)


class PaddedLlama(Llama):
    """Samples of other lengths, padded, labels as a collator makes them."""

    def build(self) -> None:
        super().build()
        self.model.loss_function = causal_loss

    @classmethod
    def samples(cls) -> list[Any]:
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=torch.Generator().manual_seed(5))
        mask = torch.arange(LENGTH) < lengths
        labels = tokens().masked_fill(~mask, IGNORED)
        return rows(input_ids=tokens(), attention_mask=mask.long(), labels=labels)


class Bert(Base):
    """transformers' BERT with both of its losses: masked tokens, and whether one sentence follows the other."""

    def build(self) -> None:
        from transformers import BertConfig, BertForPreTraining

        config = BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=TOKENS,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        )  # fmt: skip
        self.model = BertForPreTraining(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    @classmethod
    def samples(cls) -> list[Any]:
        labels = tokens().masked_fill(~chosen(), IGNORED)
        following = torch.randint(0, 2, (SAMPLES,), generator=torch.Generator().manual_seed(6))
        return rows(input_ids=tokens(), labels=labels, next_sentence_label=following)


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


class Masked(Tokens):
    """Sums divided by a mask's sum, the mask made of what is in the batch, padding overwritten in place."""

    def loss(self, batch: Any) -> Tensor:
        labels = batch["input_ids"].clone()
        labels[batch["labels"] < 0] = IGNORED
        losses = F.cross_entropy(self.logits(batch).transpose(1, 2), labels, reduction="none")
        mask = (labels != IGNORED).to(losses.dtype)
        self.log("by_tokens", (losses * mask).sum() / mask.sum(), batch_size=int(mask.sum()))
        some = mask * (batch["input_ids"][:, :1] < 9)  # of microbatches, some have none
        count = some.sum().clamp(min=1)
        self.log("bounded", (losses * some).sum() / count, on_step=False, on_epoch=True, batch_size=int(count))
        return (losses * mask).sum() / mask.sum()


class Selected(Tokens):
    """Only what counts is picked; the second loss by another choice."""

    def loss(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        counts = labels != IGNORED
        logits = self.logits(batch)
        small = batch["input_ids"] < 9
        return F.cross_entropy(logits[counts], labels[counts]) + logits.pow(2).mean(-1)[small].mean()


class Head(nn.Module):
    """Computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, TOKENS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).transpose(1, 2), labels)


class LossInHead(Tokens):
    """The loss inside a module with parameters."""

    def build(self) -> None:
        super().build()
        self.head = Head()

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.head(self.blocks(self.embed(batch["input_ids"])), batch["labels"])
        return loss


class Compiled(Tokens):
    """A loss that torch.compile has."""

    def build(self) -> None:
        super().build()
        self.compiled = torch.compile(super().loss, backend="aot_eager")

    def loss(self, batch: Any) -> Tensor:
        return self.compiled(batch)


def labels_that_count(batch: Any) -> Tensor:
    """What the loss of `Tokens` averages over."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


COUNTED = {model.__name__: model for model in (PaddedLlama, Bert, Tokens, Masked, Selected, LossInHead, Compiled)}
EQUAL = ("PaddedLlama", "Masked", "LossInHead")  # classes' weights and sums: test_spellings.py
