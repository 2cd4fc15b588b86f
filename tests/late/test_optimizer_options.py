"""late/optimizer_options.py: a late update is made with the options of its own batch, and loses nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_parallel.late.optimizer_options import options_of, restored


def two_groups() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}], momentum=0.5)


def test_an_update_uses_the_options_that_were_and_leaves_those_that_are() -> None:
    optimizer = two_groups()
    were = options_of(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the scheduler has gone on
    are = options_of(optimizer)
    parameters = [group["params"][0] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with restored(optimizer, were, set()):
        optimizer.step()
    assert [float(p.detach()) for p in parameters] == [0.5, 0.75]
    assert options_of(optimizer) == are


def test_options_are_put_back_after_an_error() -> None:
    optimizer = two_groups()
    with pytest.raises(RuntimeError, match="no luck"), restored(optimizer, options_of(optimizer, 0.5), set()):
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
        raise RuntimeError("no luck")
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_options_hold_no_parameters_and_only_the_rate_takes_the_factor() -> None:
    whole, half = options_of(two_groups()), options_of(two_groups(), 0.5)
    for group, other in zip(whole, half, strict=True):
        assert "params" not in group
        assert other == {**group, "lr": group["lr"] / 2}


def test_a_rate_that_is_a_tensor_is_kept_as_it_was_and_stays_the_scheduler_s() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, foreach=False)
    were = options_of(optimizer)
    rate.fill_(0.1)  # as torch's schedulers do
    with restored(optimizer, were, set()):
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)


class Counting(torch.optim.SGD):
    """Writes to its groups, as schedule-free optimizers do: a count, a sum of rates, an estimate."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group.update(k=0, weight_sum=0.0, d=torch.tensor(1.0))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["weight_sum"] += group["lr"]
            group["d"] = group["d"] * 2
        result = super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
        return result


def test_what_an_optimizer_writes_to_its_groups_is_its_state_and_stays() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Counting([parameter], lr=0.5)
    written, waiting = set[str](), []
    for batch in range(6):  # each update is two batches late
        optimizer.param_groups[0]["lr"] = 2.0**-batch
        waiting.append(options_of(optimizer))
        if batch >= 2:
            parameter.grad = torch.ones(1)
            with restored(optimizer, waiting.pop(0), written):
                optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 2.0**-batch
    (group,) = optimizer.param_groups
    assert group["k"] == 4 and group["d"] == 16
    assert group["weight_sum"] == 1 + 1 / 2 + 1 / 4 + 1 / 8
