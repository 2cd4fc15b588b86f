"""What has been written to a tensor is seen by a digest of its bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_parallel.ranks.writes import digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("change", [torch.neg, lambda x: x / 2, lambda x: x + 1, torch.zeros_like])
def test_a_change_of_all_entries_alters_the_digest(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    values = torch.full((64, 64), 3, dtype=dtype)  # a power of two of them, so that a sum of 64 bits may come round
    assert digest(values) == digest(values.clone().T)
    assert digest(change(values).to(dtype)) != digest(values)
