"""A layer that runs again in its backward computes what it would have, keeps its input only, and meets no cache."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_parallel.pipeline.recompute import recomputed
from lightning_parallel.pipeline.seeding import host_generators_state


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.runs = 0
        self.caches: list[Any] = []

    def forward(self, x: Tensor, scale: float, *, cache: Any = None) -> Tensor:
        self.runs += 1
        self.caches.append(cache)
        return self.linear(x).tanh() * scale


def test_a_layer_runs_again_in_the_backward_with_the_same_gradients() -> None:
    layer, x = Layer(), torch.randn(2, 3)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    layer(inputs[0], 2.0).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    output = recomputed(layer, False, layer, inputs[1], 2.0)
    assert layer.runs == 2
    output.sum().backward()
    assert layer.runs == 3
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_a_cache_is_not_handed_to_what_runs_twice() -> None:
    layer, cache = Layer(), DynamicCache()
    recomputed(layer, False, layer, torch.randn(2, 3, requires_grad=True), 1.0, cache=cache)
    assert layer.caches == [None]
    with torch.no_grad():  # in evaluation it runs once
        recomputed(layer, False, layer, torch.randn(2, 3), 1.0, cache=cache)
    assert layer.caches[1] is cache


def test_statistics_count_the_inputs_once() -> None:
    norms, x = [nn.BatchNorm1d(3) for _ in range(2)], torch.randn(4, 3)
    norms[0](x).sum().backward()
    recomputed(norms[1], False, norms[1].forward, x.requires_grad_()).sum().backward()
    one, other = (norm.state_dict() for norm in norms)
    assert all(torch.equal(one[name], other[name]) for name in one) and one["num_batches_tracked"] == 1


class Masked(nn.Module):
    """Masks drawn from NumPy's and Python's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(x.shape[-1])).to(x.dtype) * random.random()


def test_masks_of_python_and_numpy_are_the_same_again() -> None:
    layer, x = Masked(), torch.randn(2, 3, requires_grad=True)
    output = recomputed(layer, True, layer, x)
    state = host_generators_state()
    output.sum().backward()
    assert torch.allclose(x.grad * x, output)  # type: ignore[operator]
    assert host_generators_state() == state
