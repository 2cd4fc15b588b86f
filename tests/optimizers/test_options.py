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


def test_a_rate_that_is_a_tensor_is_kept_as_it_was_and_stays_the_scheduler_s() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, foreach=False)
    were = options_of(optimizer)
    rate.fill_(0.1)  # as torch's schedulers do
    with restored(optimizer, were, set()):
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)


def test_a_count_that_the_first_step_makes_is_the_optimizer_s() -> None:
    """Options of later batches were copied after it, so they hold an earlier count."""
    optimizer = two_groups()
    written: set[str] = set()
    early = options_of(optimizer)
    later = [{**group, "step": 1} for group in early]
    for count, were in enumerate([early, early, later, later], 1):
        with restored(optimizer, were, written):
            for group in optimizer.param_groups:
                group["step"] = group.get("step", 0) + 1
        assert [group["step"] for group in optimizer.param_groups] == [count] * 2


def test_what_a_scheduler_sets_after_a_hook_s_write_stays() -> None:
    optimizer, written = two_groups(), set[str]()
    with restored(optimizer, options_of(optimizer), written):
        optimizer.param_groups[0]["lr"] = 0.001  # as in on_before_optimizer_step
    optimizer.param_groups[0]["lr"] = 0.05
    with restored(optimizer, options_of(optimizer), written):
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["lr"] == 0.05
