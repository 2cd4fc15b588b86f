"""How many labels a batch has over all replicas, so that a loss is the mean over them and not a mean of means.

Replicas take the rows of a batch in turn, and each row may have another number of labels. The sampler knows the rows of
all replicas, so it hands the dataset a row's number together with the sum of its batch's labels::

    rows of a batch     0    1    2    3         replica 0 gets (0, 9), (2, 9)
    labels              2    4    0    3         replica 1 gets (1, 9), (3, 9)

Where the last batch has no row left for a replica, it gets one of which nothing is learned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from recipes.data.documents import IGNORED


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
    """A DistributedSampler that gives :class:`Place` instead of numbers. The batch size is over all replicas."""

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
