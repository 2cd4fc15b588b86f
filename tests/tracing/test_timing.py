"""Times of units: of their own work, on stand-ins, with nothing left behind."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor, absent_like, make_absent
from lightning_parallel.interception import Invocation
from lightning_parallel.tracing.timing import RUNS, nanoseconds_of

CPU = torch.device("cpu")


class Sleeps(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Any:
        assert not isinstance(self.weight, AbsentTensor) and not isinstance(x, AbsentTensor)
        self.runs += 1
        time.sleep(0.01)
        return {"out": super().forward(x), "none": None}


def test_the_fastest_of_several_runs_counts() -> None:
    unit = Sleeps(3, 3)
    make_absent(unit, lambda name: name, CPU)
    taken = nanoseconds_of(Invocation(unit, unit.forward, (absent_like(torch.ones(2, 3), "x"),), {}), CPU)
    assert 0.01e9 < taken < 1e9 and unit.runs == 1 + RUNS
    assert isinstance(unit.weight, AbsentTensor) and unit.weight.grad is None
