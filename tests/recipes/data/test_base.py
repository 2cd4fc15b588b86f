"""recipes/data/base.py: the same samples at the same step, whatever the layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from recipes.data.base import SeededData
from recipes.data.digits import DigitsData


class Numbers(SeededData):
    """The numbers 0..49 for training and 0..11 for validation."""

    def __init__(self, replicas: int = 1, rank: int = 0, batch_size: int = 6, seed: int = 3) -> None:
        super().__init__(batch_size, workers=0, seed=seed)
        self.train_set = TensorDataset(torch.arange(50))
        self.val_set = self.test_set = TensorDataset(torch.arange(12))
        shard = {"num_replicas": replicas, "rank": rank} if replicas > 1 else None
        self.trainer: Any = SimpleNamespace(distributed_sampler_kwargs=shard)


def epoch(data: Numbers, number: int = 0) -> list[list[int]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)  # as Lightning does
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_replicas_batches_joined_are_the_single_process_batch(replicas: int) -> None:
    single = epoch(Numbers())
    shards = [epoch(Numbers(replicas, rank)) for rank in range(replicas)]
    joined = [sorted(sum(batches, [])) for batches in zip(*shards, strict=True)]
    assert joined == [sorted(batch) for batch in single]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(0)
    first = epoch(Numbers())
    torch.manual_seed(1)
    assert epoch(Numbers()) == first
    assert epoch(Numbers(), 1) != first
    assert epoch(Numbers(seed=4)) != first


def test_training_batches_are_full_and_validation_sees_each_sample_once() -> None:
    assert [len(batch) for batch in epoch(Numbers())] == [6] * 8
    seen = [loader for rank in range(2) for loader in Numbers(2, rank).val_dataloader()]
    assert sorted(torch.cat([batch for (batch,) in seen]).tolist()) == list(range(12))


def test_a_batch_that_cannot_be_shared_or_filled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.batch_size=6 .* by 4 replicas: use a multiple of 4"):
        Numbers(4).train_dataloader()
    with pytest.raises(ValueError, match=r"data.batch_size=51 is more than the 50 training samples"):
        Numbers(batch_size=51).train_dataloader()


def test_images_are_scaled_and_the_split_does_not_depend_on_the_seed() -> None:
    one, other = DigitsData(seed=1), DigitsData(seed=2)
    one.setup("fit")
    other.setup("fit")
    sizes = [len(split) for split in (one.train_set, one.val_set, one.test_set)]  # type: ignore[arg-type]
    assert sizes == [1437, 180, 180]
    images, labels = next(iter(one.train_dataloader()))
    assert images.shape == (48, 1, 8, 8) and images.dtype == torch.float32
    assert images.min() == 0 and images.max() == 1
    assert labels.dtype == torch.int64 and set(labels.tolist()) <= set(range(10))
    assert all(torch.equal(one.val_set[i][0], other.val_set[i][0]) for i in range(180))
    assert one.fingerprint == other.fingerprint
