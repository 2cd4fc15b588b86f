"""Layers that share an input send its gradient once; what they compute stays the same."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_parallel.tensor.sharding import shard_module
from tests.pool import WorkerPool
from tests.tensor.helpers import Messages, world


class Attention(nn.Module):
    """q, k and v of one tensor; of another one if there is one (cross-attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 4) for _ in range(3))
        self.o = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        source = x if other is None else other
        result: torch.Tensor = self.o(self.q(x).tanh() * self.k(source).sigmoid() + self.v(source))
        return result


PLAN = dict.fromkeys("qkv", "column") | {"o": "row"}


def compare(cross: bool) -> int:
    """All-reduces of a backward, after comparing its gradients with the whole model's."""
    group = world()
    torch.manual_seed(0)
    whole = Attention().double()
    model = copy.deepcopy(whole)
    sharding = shard_module(model, PLAN, group)
    for _ in range(2):
        inputs = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(1 + cross)]
        loss = whole(*inputs).square().sum()
        expected = torch.autograd.grad(loss, [*inputs, *whole.parameters()])
        sharded_loss = model(*inputs).square().sum()
        with Messages() as messages:
            found = torch.autograd.grad(sharded_loss, [*inputs, *model.parameters()])
        names = [None] * len(inputs) + [name for name, _ in whole.named_parameters()]
        for name, one, other in zip(names, expected, found, strict=True):
            shard = sharding.shards.get(name or "")
            assert float(((one if shard is None else shard.take(one)) - other).abs().max()) < 1e-12, name
    assert all("allreduce" in name for name, _ in messages.sent)
    return len(messages.sent)


def test_one_input_s_gradient_is_sent_once(pool: WorkerPool) -> None:
    assert pool.run(compare, 2, False) == [1, 1]


def test_another_input_s_gradient_is_sent_by_itself(pool: WorkerPool) -> None:
    assert pool.run(compare, 2, True) == [2, 2]


def nothing_is_kept(cross: bool) -> bool:
    """Whether the inputs have been freed with the graph, once all layers have been called."""
    group = world()
    model = Attention()
    shard_module(model, PLAN, group)
    inputs = [torch.randn(3, 6, requires_grad=True) * 1 for _ in range(1 + cross)]
    loss = model(*inputs).sum()
    held = [weakref.ref(x) for x in inputs]
    del inputs
    loss.backward()
    del loss
    gc.collect()
    return all(x() is None for x in held)


@pytest.mark.parametrize("cross", [False, True])
def test_the_shared_copy_is_let_go(pool: WorkerPool, cross: bool) -> None:
    assert pool.run(nothing_is_kept, 2, cross) == [True, True]
