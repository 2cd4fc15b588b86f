"""recipes/data/digits.py: scikit-learn's digits."""

from __future__ import annotations

import torch

from recipes.data.digits import DigitsData


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
