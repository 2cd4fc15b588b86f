"""Parameters, and buffers of several stages, that change where the dry run of a step hasn't seen it end the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.steps.changes import StepChanges


def test_one_that_is_changed_and_put_back_is_left_alone() -> None:
    """As PEFT does for the time of a call, where it adapts a parameter that is in no layer of its own. A norm that is
    set, in place, is the same after each call."""
    module = nn.Linear(3, 2)
    changes = StepChanges(module)

    @torch.no_grad()
    def step() -> None:
        own = module.bias.clone()
        module.bias.add_(1)
        module.bias.copy_(own)
        module.weight.copy_(module.weight.sign())

    for _ in range(2):
        changes.begin_batch((), 2, 1)
        for k in range(2):
            changes.run(step, k)


def test_one_that_is_replaced_for_each_microbatch_is_refused() -> None:
    module = nn.Linear(3, 2)
    changes = StepChanges(module)

    def step() -> None:
        module.bias = nn.Parameter(module.bias.detach() + 1)

    changes.begin_batch((), 2, 1)
    changes.run(step, 0)
    with pytest.raises(RuntimeError, match="'bias'"):
        changes.run(step, 1)


def test_a_buffer_that_other_stages_read_must_not_be_changed_by_its_layer() -> None:
    module = nn.BatchNorm1d(2)
    changes = StepChanges(module, ["running_mean"])
    changes.begin_batch((), 1, 1)
    changes.run(lambda: module.num_batches_tracked.add_(1), 0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="'running_mean'"):
        changes.run(lambda: module.running_mean.add_(1), 0)  # type: ignore[union-attr]
