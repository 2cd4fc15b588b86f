"""Parameters, and buffers of several stages, that change where the dry run of a step hasn't seen it end the run."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch import TorchDispatchMode
from lightning_parallel.steps.changes import StepChanges


def run_batch(changes: StepChanges, module: nn.Linear, microbatches: int, chunks: int, writes: list[str]) -> None:
    """A batch of which each run of the step changes one parameter, or none."""
    changes.follow({"weight"}, microbatches, chunks)
    for run, name in enumerate(writes):
        with suppress(LeaveStep), changes.around_run(run // chunks), torch.no_grad():
            if name:
                getattr(module, name).add_(1)
            if run % 2:
                raise LeaveStep  # as on a stage that isn't the last


@pytest.mark.parametrize(
    ("microbatches", "chunks", "writes", "is_refused"),
    [
        (2, 1, ["bias", "bias"], True),
        (2, 1, ["", "bias"], True),  # by what is in the microbatch; the next batch tells
        (1, 2, ["bias", "bias"], True),
        (1, 2, ["", "bias"], False),  # a layer of the second chunk
        (2, 1, ["weight", "weight"], False),  # the dry run has seen it
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_more_or_fewer_runs_of_a_batch_change_is_refused(
    trained: bool, microbatches: int, chunks: int, writes: list[str], is_refused: bool
) -> None:
    module = nn.Linear(1, 1).requires_grad_(trained)
    changes = StepChanges(module)
    with pytest.raises(RuntimeError, match=r"'bias'.*microbatches=1") if is_refused else nullcontext():
        for _ in range(2):
            run_batch(changes, module, microbatches, chunks, writes)


def test_one_that_is_changed_and_put_back_is_left_alone() -> None:
    """As PEFT does for the time of a call, where it adapts a parameter that is in no layer of its own. A norm that is
    set, in place, is the same after each call."""
    module = nn.Linear(3, 2)
    changes = StepChanges(module)
    for _ in range(2):
        changes.follow((), 2, 1)
        for k in range(2):
            with changes.around_run(k), torch.no_grad():
                own = module.bias.clone()
                module.bias.add_(1)
                module.bias.copy_(own)
                module.weight.copy_(module.weight.sign())


def test_parameters_that_nobody_writes_to_are_not_read() -> None:
    """To read them takes seconds for a large model."""
    changes = StepChanges(nn.Linear(1, 1))
    called: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        for _ in range(2):
            changes.follow((), 2, 1)
            for k in range(2):
                with changes.around_run(k):
                    pass
    assert not called


def test_a_buffer_that_other_stages_read_must_not_be_changed_by_its_layer() -> None:
    module = nn.BatchNorm1d(2)
    changes = StepChanges(module, ["running_mean"])
    changes.follow((), 1, 1)
    with changes.around_run(0):
        module.num_batches_tracked.add_(1)
    with pytest.raises(RuntimeError, match="'running_mean'"), changes.around_run(0):
        module.running_mean.add_(1)  # type: ignore[union-attr]
