"""A look leaves the batch as it is, whatever the batch is, and notices a step that changes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_parallel.checks.batch_watch import BatchWatch
from lightning_parallel.plan.flow import FlowError
from lightning_parallel.plan.partition import Partition
from lightning_parallel.plan.search import partition


def parts(chunks: int) -> Partition:
    """Of a chain of four layers on one stage."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    return partition(module, lambda: module(torch.ones(1, 2)).sum(), 1, placement=(0,) * chunks)


@pytest.mark.parametrize(
    ("batch", "change"),
    [
        (torch.ones(2, 3), lambda x: x.mul_(2)),
        ({"x": [torch.ones(2)]}, lambda batch: batch["x"][0].zero_()),
        (torch.ones(3, 2).t(), lambda x: x.t()[0].add_(1)),
    ],
)
def test_a_change_in_place_is_noticed_and_stays_in_the_look(batch: Any, change: Callable[[Any], Any]) -> None:
    watch, before = BatchWatch(), str(batch)
    watch.run_on_copy(change, batch)
    assert str(batch) == before
    watch.check("training_step", parts(1))
    watch.run_on_copy(change, batch)
    with pytest.raises(FlowError, match="training_step changes a tensor of its batch in place"):
        watch.check("training_step", parts(2))
    watch.check("training_step", parts(2))  # of the look before it alone


def test_a_step_that_changes_nothing_passes_and_its_error_is_its_own() -> None:
    watch = BatchWatch()
    assert watch.run_on_copy(lambda x, index: x + index, torch.ones(2), 1).tolist() == [2, 2]
    watch.check("training_step", parts(2))
    with pytest.raises(KeyError):
        watch.run_on_copy(lambda batch: batch["y"], {"x": torch.ones(1)})


def test_packed_sequences_of_an_evaluation_can_be_looked_at() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = BatchWatch().run_on_copy(lambda batch: batch, packed)
    assert isinstance(found, PackedSequence)
