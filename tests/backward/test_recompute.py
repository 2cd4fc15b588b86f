"""A layer that runs again in its backward computes what it would have, keeps its input only, and meets no cache."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_parallel.backward import recompute
from lightning_parallel.backward.recompute import Recomputed
from tests.pipeline.nets import Calls


def test_a_cache_is_not_handed_to_what_runs_twice() -> None:
    def forward(x: Tensor, *, cache: Any) -> Tensor:
        caches.append(cache)
        return layer(x)

    caches, layer, cache = list[Any](), nn.Linear(3, 3), DynamicCache()
    again = Recomputed(layer, forward)
    again(torch.randn(2, 3, requires_grad=True), cache=cache)
    with torch.no_grad():  # in evaluation it runs once
        again(torch.randn(2, 3), cache=cache)
    assert caches[0] is None and caches[1] is cache


def test_statistics_count_the_inputs_once() -> None:
    norms = [nn.BatchNorm1d(3) for _ in range(2)]
    again = Recomputed(norms[1], norms[1].forward)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        norms[0](x).sum().backward()
        again(x).sum().backward()
    one, other = (norm.state_dict() for norm in norms)
    assert all(torch.equal(one[name], other[name]) for name in one) and one["num_batches_tracked"] == 3


def writes(kind: str) -> Any:
    """Its output depends on a tensor without gradient, which it changes."""

    def run(m: Any, x: Tensor) -> Tensor:
        if kind == "in place":
            m.scale += 1
        elif kind == "assigned":
            m.scale = m.scale + 1
        elif kind == "frozen parameter":
            with torch.no_grad():
                m.book += 1
        return x * m.weight * m.scale * m.book  # type: ignore[no-any-return]

    weight, book = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.ones(3), requires_grad=False)
    scale = nn.Buffer(torch.ones(1).expand(3) if kind == "expanded" else torch.ones(3))
    return Calls(run, weight=weight, scale=scale, book=book)


@pytest.mark.parametrize("kind", ["in place", "assigned", "frozen parameter", "expanded"])
def test_it_starts_from_what_the_first_run_found(kind: str) -> None:
    one, other = writes(kind), writes(kind)
    again = Recomputed(other, other.forward)
    for _ in range(3):
        x = torch.randn(2, 3)
        one(x).sum().backward()
        again(x).sum().backward()
        assert torch.equal(one.weight.grad, other.weight.grad)
    assert torch.equal(one.scale, other.scale) and torch.equal(one.book, other.book)


def test_copies_of_what_it_leaves_alone_are_not_held_until_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights under adapters would be held twice."""
    made: list[weakref.ref[Tensor]] = []

    def noted(tensor: Tensor) -> Tensor:
        copy = original(tensor)
        made.append(weakref.ref(copy))
        return copy

    original = recompute._copy
    monkeypatch.setattr(recompute, "_copy", noted)
    layer = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.BatchNorm1d(3))
    again = Recomputed(layer, layer.forward)
    outputs = [again(torch.randn(4, 3, requires_grad=True)) for _ in range(2)]
    assert sum(copy() is not None for copy in made) == 2 * 3 and len(made) == 5 + 3
    sum(output.sum() for output in outputs).backward()
