"""strategies/optimizer_options.py: a late update is made with the options of its own batch."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel.strategies.optimizer_options import options_of, with_options


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
    with with_options(optimizer, were):
        optimizer.step()
    assert [float(p.detach()) for p in parameters] == [0.5, 0.75]
    assert options_of(optimizer) == are


def test_options_are_put_back_behind_an_error() -> None:
    optimizer = two_groups()
    with pytest.raises(RuntimeError, match="no luck"), with_options(optimizer, options_of(optimizer, 0.5)):
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
    with with_options(optimizer, were):
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)
