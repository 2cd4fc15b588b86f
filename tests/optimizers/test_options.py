"""optimizers/options.py: a late update is made with the options of its own batch, and loses nothing else."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel.optimizers.options import options_of, restored


def two_groups() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}], momentum=0.5)


def test_options_are_put_back_after_an_error() -> None:
    optimizer = two_groups()
    with pytest.raises(RuntimeError, match="no luck"), restored(optimizer, options_of(optimizer, 0.5), set()):
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
        raise RuntimeError("no luck")
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_what_a_scheduler_sets_after_a_hook_s_write_stays() -> None:
    optimizer, written = two_groups(), set[str]()
    with restored(optimizer, options_of(optimizer), written):
        optimizer.param_groups[0]["lr"] = 0.001  # as in on_before_optimizer_step
    optimizer.param_groups[0]["lr"] = 0.05
    with restored(optimizer, options_of(optimizer), written):
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["lr"] == 0.05
