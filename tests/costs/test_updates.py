"""The optimizer's step is tried on tensors like the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.costs.devices import Device, seconds_of
from lightning_parallel.costs.updates import Updates

HERE = torch.device("cpu")
DEVICE = Device("a CPU", 1e9, 1e9, 1e9, 0.0, 0.0, measured=True)


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("not on these")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 8))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_its_time_is_that_of_a_step(kind: Any) -> None:
    module = layers()
    optimizer = kind(module.parameters(), lr=1e-3)
    before = [p.clone() for p in module.parameters()]
    updates = Updates(module, [optimizer], DEVICE, HERE)
    whole = updates.seconds(dict.fromkeys(dict(module.named_parameters()), 1.0), divided=False)
    part = updates.seconds({"0.weight": 1.0, "0.bias": 1.0}, divided=False)
    assert not optimizer.state and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    [measured] = seconds_of([optimizer.step], HERE)
    assert measured / 5 < whole < 5 * measured  # of less than a millisecond, on a machine that does other work too
    assert part < whole


def test_one_that_cannot_be_tried_takes_its_bytes() -> None:
    module = layers()
    updates = Updates(module, [Broken(module.parameters(), lr=0.1)], DEVICE, HERE)
    assert updates.seconds({"0.weight": 1.0}, divided=False) == pytest.approx(2 * DEVICE.passes(4 * 512 * 512 * 2))
