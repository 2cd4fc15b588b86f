"""What several of these files set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    """Seeded, and float64 by default."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
