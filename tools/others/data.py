"""Loaders of random samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tools.others.entry import SAMPLES


class Dicts(Dataset):
    """Samples that are dictionaries of tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def rows(batch_size: int, *columns: Tensor) -> DataLoader[Any]:
    """Batches that are lists of tensors."""
    return DataLoader(TensorDataset(*columns), batch_size)


def named(batch_size: int, **columns: Tensor) -> DataLoader[Any]:
    """Batches that are dictionaries of tensors."""
    return DataLoader(Dicts(**columns), batch_size)


def normal(*shape: int) -> Tensor:
    """[samples, *shape]"""
    return torch.randn(SAMPLES, *shape)


def classes(count: int, *shape: int) -> Tensor:
    """[samples, *shape], from 0 to count - 1"""
    return torch.randint(0, count, (SAMPLES, *shape))
