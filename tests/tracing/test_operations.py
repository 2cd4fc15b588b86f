"""Operations are counted by torch's formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import flop_registry

from lightning_parallel.tracing.operations import OperationsNoted


def test_products_count() -> None:
    with OperationsNoted() as noted, torch.no_grad():
        nn.Linear(4, 3, bias=False)(torch.ones(5, 4)).relu()
    assert noted.flops == 2 * 5 * 4 * 3


def test_attention_on_a_cpu_counts() -> None:
    q, k = torch.ones(2, 8, 3, 4), torch.ones(2, 8, 5, 4)
    with OperationsNoted() as noted, torch.no_grad():
        F.scaled_dot_product_attention(q, k, k)
    assert noted.flops == 2 * (2 * 2 * 8 * 3 * 5 * 4)


def test_a_formula_that_a_user_adds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, torch.ops.aten.sin, lambda *_, **__: 7)
    with OperationsNoted() as noted:
        torch.ones(3).sin()
    assert noted.flops == 7


def test_results_count_but_for_views_and_what_is_changed_in_place() -> None:
    layer, x = nn.Linear(4, 3, bias=False), torch.ones(2, 5, 4)
    with OperationsNoted() as noted, torch.no_grad():
        y = layer(x)  # three dimensions: a matmul of a view
        y.transpose(0, 1)
        y.add_(1)
        y.exp()
    assert noted.nbytes == 2 * (2 * 5 * 3 * 4)
