"""Parameters, and buffers of several stages, that change where the dry run of a step hasn't seen it end the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch import TorchDispatchMode
from lightning_parallel.steps.unseen_writes import UnseenWrites


def test_one_that_changes_for_one_microbatch_alone_is_refused_at_the_next_batch() -> None:
    module = nn.Linear(1, 1)
    unseen = UnseenWrites(module)
    unseen.follow((), 2, 1)
    for k in range(2):
        with unseen.around_run(k), torch.no_grad():
            if k == 1:
                module.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"'weight'.*microbatches=1"):
        unseen.follow((), 2, 1)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_parameter_that_two_runs_of_a_batch_change_is_refused(trained: bool, chunks: int) -> None:
    """Two microbatches, or two chunks of one."""
    module = nn.Linear(1, 1).requires_grad_(trained)
    unseen = UnseenWrites(module)
    for inner in (module.weight, module.bias):
        unseen.follow({"weight"}, 3 - chunks, chunks)
        with unseen.around_run(0), torch.no_grad():
            inner.add_(1)
        if inner is module.bias:
            with pytest.raises(RuntimeError, match=r"'bias'.*microbatches=1"), unseen.around_run(0), torch.no_grad():
                inner.add_(1)
                raise LeaveStep  # as on a stage that isn't the last


def test_one_of_which_the_only_microbatch_is_run_once_a_chunk_may_change_in_its_layer() -> None:
    module = nn.Linear(1, 1)
    unseen = UnseenWrites(module)
    for _ in range(2):
        unseen.follow((), 1, 2)
        for chunk in range(2):
            with unseen.around_run(0), torch.no_grad():
                if chunk == 1:
                    module.weight.add_(1)


def test_one_that_is_changed_and_put_back_is_left_alone() -> None:
    """As PEFT does for the time of a call, where it adapts a parameter that is in no layer of its own. A norm that is
    set, in place, is the same after each call."""
    module = nn.Linear(3, 2)
    unseen = UnseenWrites(module)
    for _ in range(2):
        unseen.follow((), 2, 1)
        for k in range(2):
            with unseen.around_run(k), torch.no_grad():
                own = module.bias.clone()
                module.bias.add_(1)
                module.bias.copy_(own)
                module.weight.copy_(module.weight.sign())


def test_parameters_that_nobody_writes_to_are_not_read() -> None:
    """To read them takes seconds for a large model."""
    unseen = UnseenWrites(nn.Linear(1, 1))
    called: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        for _ in range(2):
            unseen.follow((), 2, 1)
            for k in range(2):
                with unseen.around_run(k):
                    pass
    assert not called


def test_a_buffer_that_other_stages_read_must_not_be_changed_by_its_layer() -> None:
    module = nn.BatchNorm1d(2)
    unseen = UnseenWrites(module, ["running_mean"])
    unseen.follow((), 1, 1)
    with unseen.around_run(0):
        module.num_batches_tracked.add_(1)
    with pytest.raises(RuntimeError, match="'running_mean'"), unseen.around_run(0):
        module.running_mean.add_(1)  # type: ignore[union-attr]
