"""Rows that say how many labels their batch has: the replicas' shares of a batch are the batch of one process."""

from __future__ import annotations

import pytest
import torch

from recipes.data.documents import IGNORED
from recipes.data.rows import CountedRows, CountingSampler

ROWS = 22


def rows() -> CountedRows:
    counts = [(7 * number) % 5 for number in range(ROWS)]
    plain = [{"labels": torch.tensor([IGNORED] * (5 - n) + [number] * n)} for number, n in enumerate(counts)]
    return CountedRows(plain, counts)


def batches(replicas: int, *, train: bool, epoch: int = 0) -> list[list[dict[str, torch.Tensor]]]:
    """Of four rows over all replicas."""
    data, found = rows(), []
    for rank in range(replicas):
        sampler = CountingSampler(data, 4, num_replicas=replicas, rank=rank, shuffle=train, seed=3, drop_last=train)
        sampler.set_epoch(epoch)
        places, each = list(sampler), 4 // replicas
        assert len(places) == len(sampler)
        found.append([[data[place] for place in places[i : i + each]] for i in range(0, len(places), each)])
    return [[row for part in parts for row in part] for parts in zip(*found, strict=True)]


def learned(batch: list[dict[str, torch.Tensor]]) -> list[int]:
    return sorted(int(label) for row in batch for label in row["labels"] if label != IGNORED)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_learn_what_one_process_does(replicas: int, train: bool, epoch: int) -> None:
    one, several = batches(1, train=train, epoch=epoch), batches(replicas, train=train, epoch=epoch)
    whole = ROWS // 4
    assert [learned(batch) for batch in several[:whole]] == [learned(batch) for batch in one[:whole]]
    if not train:  # the last batch has two rows
        assert len(several) == len(one) == whole + 1 and learned(several[-1]) == learned(one[-1])
    for batch in several:
        assert {int(row["labels_in_batch"]) for row in batch} == {len(learned(batch))}


def test_another_epoch_has_another_order() -> None:
    assert [learned(batch) for batch in batches(2, train=True)] != [learned(b) for b in batches(2, train=True, epoch=1)]
