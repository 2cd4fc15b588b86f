"""Batches whose samples don't lie along dimension 0 of all tensors train as in one process, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import Base, Rows

WIDTH = 3


class Tables(Base):
    """A batch of tables of different lengths: their rows one below the other, and the table of each row."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(self, batch: Any) -> Tensor:
        rows, table, targets = batch
        sums = torch.zeros(len(targets), 1).index_add(0, table, self.net(rows))
        self.log("distance", (sums - targets).abs().mean(), on_epoch=True)
        return (sums - targets).square().mean()

    @classmethod
    def loader(cls, *_: Any, **__: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        batches = []
        for lengths in ([3, 1, 2, 4], [2, 2, 1, 5]):
            table = torch.arange(4).repeat_interleave(torch.tensor(lengths))
            values = torch.randn(len(table) + 4, WIDTH, generator=generator)
            batches.append((values[4:], table, values[:4, :1]))
        return DataLoader(Rows(batches), batch_size=None)


class Packed(Base):
    """Sequences of different lengths, packed between the layers."""

    def build(self) -> None:
        self.embedding = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, batch: Any) -> Tensor:
        tokens, lengths = batch
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1]).square().mean()

    @classmethod
    def loader(cls, *_: Any, **__: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        tokens = [torch.randint(0, 11, (4, 6), generator=generator) for _ in range(2)]
        lengths = [torch.randint(1, 7, (4,), generator=generator) for _ in range(2)]
        return DataLoader(Rows([*zip(tokens, lengths, strict=True)]), batch_size=None)


class Together(Base):
    """Its layer has a weight for each sample of the batch."""

    def build(self) -> None:
        self.weights = nn.Parameter(torch.ones(4, 1))
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs) * self.weights - targets).square().mean()

    @classmethod
    def loader(cls, *_: Any, **__: Any) -> DataLoader[Any]:
        values = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(Rows([(each, each[:, :1]) for each in values]), batch_size=None)


def of_one(batch: Any, count: int) -> list[Any]:
    assert count == 8, "four a stage, whatever the batch"
    rows, table, targets = batch
    parts = torch.arange(len(targets)).chunk(count)
    return [(rows[torch.isin(table, p)], table[torch.isin(table, p)] - p[0], targets[p]) for p in parts]


def nothing(batch: Any, count: int) -> list[Any]:
    return []


@pytest.mark.parametrize(("model", "options"), [
    (Tables, {}), (Tables, {"split": of_one}),
    (Together, {"microbatches": 1}), (Packed, {"microbatches": 2}),
])  # fmt: skip
def test_any_batch_trains_as_in_one_process(launch: Any, model: type[Base], options: dict[str, Any]) -> None:
    single = launch(train, 1, model, max_epochs=1)[0]
    reports = launch(train, 2, model, "sync", options, max_epochs=1)
    assert largest_difference(joined(reports, "weights"), single.weights) < 1e-12
    assert all(report.metrics == pytest.approx(single.metrics, abs=1e-12) for report in reports)


@pytest.mark.parametrize(("model", "options", "words"), [
    (Tables, {"microbatches": 2}, ["microbatches=2", "batch[0] has 10", "split=", "microbatches=1"]),
    (Tables, {"microbatches": 2, "split": nothing}, ["split=", "0 parts"]),
    (Together, {"microbatches": 2}, ["first of 2 microbatches", "RuntimeError", "split=", "microbatches=1"]),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(refused: Any, model: type[Base], options: Any, words: list[str]) -> None:
    refused(words, train, 2, model, "sync", options)
