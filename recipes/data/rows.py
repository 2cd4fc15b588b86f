"""Documents become rows of equal length: packed, several in a row, or each in rows of its own.

::

    packed, texts            a a a a a b b b | b b b b c c c c | ...           cut where a row is full
    packed, answers          a a a a a . . . | b b b b b c c . | ...           not cut: a question belongs to its answer
    one document a row       a a a a a . . . | b b b b b b b . | c c c c . . . .

In a packed row the positions begin again with each document, so that a model whose attention goes by them keeps
documents apart, and no document's first token is learned. The padding is a document of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from recipes.data.documents import IGNORED, Document

Row = dict[str, list[int]]


@dataclass
class _Open:
    """A row that isn't full."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], labels: list[int]) -> None:
        self.tokens += tokens
        self.labels += [IGNORED, *labels[1:]]
        self.positions += range(len(tokens))


def rows_of(documents: Iterable[Document], context: int, padding: int, *, packed: bool) -> Iterator[Row]:
    """Rows of ``context`` tokens each, of documents in order. What of a document with answers is longer than a row is
    left out. Packed rows have ``input_ids``, ``labels`` and ``position_ids``, others ``attention_mask`` instead."""
    row = _Open()
    for document in documents:
        tokens = document.tokens if document.labels is None else document.tokens[:context]
        labels = document.learned
        whole = not packed or document.labels is not None
        if row.tokens and whole and (not packed or len(tokens) > context - len(row.tokens)):
            yield _closed(row, context, padding, packed)
            row = _Open()
        while tokens:
            room = context - len(row.tokens)
            row.add(tokens[:room], labels[:room])
            tokens, labels = tokens[room:], labels[room:]
            if len(row.tokens) == context:
                yield _closed(row, context, padding, packed)
                row = _Open()
    if row.tokens:
        yield _closed(row, context, padding, packed)


def _closed(row: _Open, context: int, padding: int, packed: bool) -> Row:
    length = len(row.tokens)
    if length < context:
        row.add([padding] * (context - length), [IGNORED] * (context - length))
    closed = {"input_ids": row.tokens, "labels": row.labels}
    if packed:
        return closed | {"position_ids": row.positions}
    return closed | {"attention_mask": [1] * length + [0] * (context - length)}


def learns(row: Row) -> bool:
    """Has it a label besides its first one, which nothing comes before?"""
    return any(label != IGNORED for label in row["labels"][1:])


@dataclass(frozen=True)
class Place:
    """A row in a batch.

    Attributes:
        number: of the row.
        labels: in the batch, over all replicas.
        fills_up: nothing of it is learned.
    """

    number: int
    labels: int
    fills_up: bool


class CountedRows(Dataset[dict[str, Tensor]]):
    """A ``datasets.Dataset`` of rows with ``labels_in_batch``, int64: a number for all of a batch. ``counts`` has the
    labels of each row."""

    def __init__(self, rows: Any, counts: Sequence[int]) -> None:
        self.rows, self.counts = rows, counts

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: Place | int) -> dict[str, Tensor]:
        if isinstance(place, int):  # of another sampler, such as Lightning's for overfit_batches: nothing is counted
            return dict(self.rows[place])
        row: dict[str, Tensor] = dict(self.rows[place.number])
        if place.fills_up:
            row["labels"] = torch.full_like(row["labels"], IGNORED)
        return {**row, "labels_in_batch": torch.tensor(place.labels)}


class CountingSampler(DistributedSampler[Place]):
    """A DistributedSampler that gives a row's :class:`Place` with the labels of its batch over all replicas, so that a
    loss is the mean over them and not a mean of means. Replicas take the rows of a batch in turn::

        rows of a batch     0    1    2    3         replica 0 gets (0, 9), (2, 9)
        labels              2    4    0    3         replica 1 gets (1, 9), (3, 9)

    Where the last batch has no row left for a replica, it gets one of which nothing is learned.
    """

    def __init__(self, rows: CountedRows, batch_size: int, **options: Any) -> None:
        super().__init__(rows, **options)
        self._counts, self._batch_size = rows.counts, batch_size

    def __iter__(self) -> Iterator[Place]:
        only = copy.copy(self)  # as the only replica it gives the order of all rows, and repeats some to fill up
        only.num_replicas, only.rank, only.num_samples = 1, 0, self.total_size
        order: list[int] = list(DistributedSampler.__iter__(only))  # type: ignore[arg-type]
        rows = len(self._counts)
        for place in range(self.rank, len(order), self.num_replicas):
            begin = place // self._batch_size * self._batch_size
            batch = order[begin : min(begin + self._batch_size, rows)]
            yield Place(order[place], sum(self._counts[number] for number in batch), fills_up=place >= rows)
