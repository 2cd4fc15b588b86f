"""Layers that are gathered for an update: all at its beginning, and none is left gathered at its end."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_parallel.fully_sharded.layers import FullyShardedLayers
from tools.workers.pool import WorkerPool


def two_updates() -> tuple[list[str], list[bool], bool]:
    """The order of gathers and layers in an update, whether the layers are in parts after one that skips the second,
    and whether that one has its value in the next."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    value = net[1].weight.detach().clone()
    assert dist.group.WORLD is not None
    layers = FullyShardedLayers({"0": net[0], "1": net[1]}, dist.group.WORLD, dist.group.WORLD, torch.device("cpu"))
    order: list[str] = []
    for layer in net:
        layer.register_forward_hook(lambda *args: order.append("layer"))
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    plain = getattr(dist, name)

    def gather(*args: Any, **kwargs: Any) -> Any:
        order.append("gather")
        return plain(*args, **kwargs)

    with patch.object(dist, name, gather):
        layers.begin_update()
        sum = net(torch.ones(2, 4)).sum()
        assert layers.expect_last_backward(["0", "1"], [get_gradient_edge(sum)], dict(net.named_parameters()))
        sum.backward()
        layers.end_update()
    in_order = [*order]
    layers.begin_update()
    sum = net[0](torch.ones(2, 4)).sum()
    assert layers.expect_last_backward(["0"], [get_gradient_edge(sum)], dict(net.named_parameters()))
    sum.backward()
    layers.end_update()
    in_parts = [isinstance(layer.weight, DTensor) for layer in net]
    with torch.no_grad():
        net[1].weight.mul_(2)
    layers.begin_update()
    doubled = torch.allclose(net[1](torch.eye(4)) - net[1](torch.zeros(4, 4)), 2 * value.t(), atol=1e-6)
    return in_order, in_parts, doubled


def test_layers_are_gathered_before_the_first_one_runs_and_not_longer_than_the_update(pool: WorkerPool) -> None:
    for order, in_parts, doubled in pool.run(two_updates, 2):
        assert order == ["gather", "gather", "layer", "layer"]
        assert in_parts == [True, True]
        assert doubled
