"""Uses of attributes are told, and nobody else notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.plain_values import attribute_uses


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.last: float | None = None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = 2.0
        self.total += 1
        return self.layer(x)


def test_reads_and_assignments_are_told_in_their_order() -> None:
    module, told = Counts(), []
    with attribute_uses({module: {"calls", "total"}}, lambda part, name, assigned: told.append((part, name, assigned))):
        assert isinstance(module, Counts) and type(module).__name__ == "Counts"
        module(torch.ones(1, 2))
    uses = {kind: [assigned for _, name, assigned in told if name == kind] for kind in ("calls", "total")}
    assert uses["calls"] == [False, True] and uses["total"][:2] == [False, True]  # torch itself reads a buffer again
    assert all(part is module for part, _, _ in told)
    assert type(module) is Counts and module.calls == 1 and module.last == 2.0 and module.total == 1


def test_the_class_is_given_back_after_an_error() -> None:
    module = Counts()
    with pytest.raises(KeyError), attribute_uses({module: {"calls"}}, lambda *_: None):
        raise KeyError
    assert type(module) is Counts
