"""scikit-learn's digits: 1797 images of 8 x 8, which come with the package."""

from __future__ import annotations

import hashlib

import torch
from torch.utils.data import TensorDataset

from recipes.data.base import SeededData

# The same split in every run, whatever its seed. 180 divides by 2, 3, 4, 5 and 6, so that replicas get equal shares.
_SPLIT_SEED = 0
_VAL = _TEST = 180


class DigitsData(SeededData):
    """``(images, labels)``: float32 [1, 8, 8] in 0..1 and int64 scalars."""

    def __init__(self, *, batch_size: int = 48, workers: int = 0, seed: int = 0) -> None:
        super().__init__(batch_size, workers, seed)

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        self.fingerprint = f"digits sha256:{hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()}"
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        x = torch.from_numpy(images).float().div(16.0).reshape(-1, 1, 8, 8)[order]
        y = torch.from_numpy(labels).long()[order]
        val, test = len(y) - _VAL - _TEST, len(y) - _TEST
        self.train_set = TensorDataset(x[:val], y[:val])
        self.val_set = TensorDataset(x[val:test], y[val:test])
        self.test_set = TensorDataset(x[test:], y[test:])
