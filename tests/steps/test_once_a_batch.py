"""Parameters that a step changes itself change once a batch, however many microbatches it is called for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch import TorchDispatchMode
from lightning_parallel.steps.once_a_batch import OnceABatch


def test_each_microbatch_finds_what_the_batch_would_find() -> None:
    module = nn.Linear(1, 1, bias=False)
    once = OnceABatch(module)
    for expected in (2.0, 4.0):  # two batches
        once.follow({"weight"}, 3)
        for _ in range(3):
            with once.around_run(), torch.no_grad():
                module.weight.copy_(torch.full((1, 1), expected) if expected == 2 else module.weight * 2)
        assert module.weight.item() == expected


def test_the_others_are_left_alone() -> None:
    module = nn.Linear(1, 1)
    once = OnceABatch(module)
    once.follow((), 2)
    nn.init.ones_(module.weight)
    with once.around_run():
        nn.init.zeros_(module.weight)
    with once.around_run():
        assert module.weight.item() == 0


def test_a_frozen_parameter_that_changes_unseen_is_refused_after_the_second_microbatch() -> None:
    module = nn.Linear(1, 1).requires_grad_(False)
    once = OnceABatch(module)
    for inner in (module.weight, module.bias):
        once.follow({"weight"}, 2)
        with once.around_run(), torch.no_grad():
            inner.add_(1)
        if inner is module.bias:
            with pytest.raises(RuntimeError, match=r"'bias'.*microbatches=1"), once.around_run(), torch.no_grad():
                inner.add_(1)
                raise LeaveStep  # as on a stage that isn't the last


def test_frozen_parameters_that_nobody_writes_to_are_not_read() -> None:
    """To read them takes seconds for a large model."""
    once = OnceABatch(nn.Linear(1, 1).requires_grad_(False))
    called: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        for _ in range(2):
            once.follow((), 2)
            for _ in range(2):
                with once.around_run():
                    pass
    assert not called


def test_a_run_that_is_left_before_the_change_leaves_what_the_others_leave() -> None:
    module = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.ones_(module.weight)
    once = OnceABatch(module)
    once.follow({"weight"}, 3)
    with torch.no_grad():
        with once.around_run():
            pass  # an earlier chunk
        assert module.weight.item() == 1
        with once.around_run():
            assert module.weight.item() == 1
            module.weight.mul_(2)
        with once.around_run():
            assert module.weight.item() == 1
        assert module.weight.item() == 2


def test_a_frozen_parameter_that_is_changed_and_put_back_is_left_alone() -> None:
    """As PEFT does for the time of a call, where it adapts a parameter that is in no layer of its own."""
    module = nn.Linear(3, 2).requires_grad_(False)
    once = OnceABatch(module)
    once.follow({"weight"}, 2)
    for _ in range(2):
        with once.around_run(), torch.no_grad():
            own = module.bias.clone()
            module.bias.add_(1)
            module.bias.copy_(own)


def test_a_buffer_that_other_stages_read_must_not_be_changed_by_its_layer() -> None:
    module = nn.BatchNorm1d(2)
    once = OnceABatch(module, ["running_mean"])
    once.follow((), 1)
    with once.around_run():
        module.num_batches_tracked.add_(1)
    with pytest.raises(RuntimeError, match="'running_mean'"), once.around_run():
        module.running_mean.add_(1)  # type: ignore[union-attr]
