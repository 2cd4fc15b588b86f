"""passes.py: a step of several passes is an ordinary step where there is no pipeline."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_parallel import in_passes
from lightning_parallel.passes import Passes, first_pass, passes_of


class Counts:
    @in_passes
    def predict_step(self, batch: Tensor, batch_idx: int) -> Passes:
        """Adds up."""
        made = []
        for number in range(3):
            made.append((yield lambda number=number: batch + number))
        return torch.stack(made)

    def other_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch


def test_the_passes_run_one_after_the_other() -> None:
    assert Counts().predict_step(torch.tensor([1, 5]), 0).tolist() == [[1, 5], [2, 6], [3, 7]]


def test_the_step_keeps_its_name_and_arguments() -> None:
    step = Counts().predict_step
    assert (step.__name__, step.__doc__) == ("predict_step", "Adds up.")
    assert list(inspect.signature(step).parameters) == ["batch", "batch_idx"]


def test_a_look_at_the_step_is_one_at_its_first_pass() -> None:
    counts = Counts()
    assert first_pass(counts.predict_step)(torch.tensor([1, 5]), 0).tolist() == [1, 5]
    assert first_pass(counts.other_step) == counts.other_step and passes_of(counts.other_step) is None
    passes = passes_of(counts.predict_step)
    assert passes is not None and next(passes(torch.tensor([2]), 0))().tolist() == [2]
