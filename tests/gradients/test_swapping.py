"""gradients/swapping.py: gradients are taken off and put back without a copy, and added where there are some."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.gradients.swapping import add_gradients, swap_gradients


def parameters() -> dict[str, nn.Parameter]:
    made = {name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c")}
    made["a"].grad, made["b"].grad = torch.ones(2), torch.full((2,), 2.0)
    return made


def test_swapping_returns_what_was_there_and_twice_changes_nothing() -> None:
    held = parameters()
    a, b = held["a"].grad, held["b"].grad
    before = swap_gradients(held, {"c": torch.ones(2)})
    assert before["a"] is a and before["b"] is b and before["c"] is None
    assert held["a"].grad is None and held["c"].grad is not None
    swap_gradients(held, before)
    assert held["a"].grad is a and held["b"].grad is b and held["c"].grad is None


def test_adding_keeps_the_memory_of_a_gradient_that_is_there() -> None:
    held = parameters()
    a, new = held["a"].grad, torch.full((2,), 5.0)
    add_gradients(held, {"a": torch.ones(2), "b": None, "c": new})
    assert held["a"].grad is a and a is not None and a.tolist() == [2.0, 2.0]
    assert held["b"].grad is not None and held["b"].grad.tolist() == [2.0, 2.0]
    assert held["c"].grad is new
