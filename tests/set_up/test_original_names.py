"""set_up/original_names.py: what an optimizer keeps of a module's parameters beside its groups and its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.set_up.original_names import OriginalNames
from tools.optimizer_table import optimizers


def test_an_optimizer_inside_another_one_that_keeps_parameters_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = optimizers.Lookahead(optimizers.KeepsIds(module.parameters()))
    with pytest.raises(ValueError, match=r"KeepsIds keeps .*'[01]\.weight'.* 'kept'.*SomeStrategy"):
        OriginalNames(module.named_parameters(), "SomeStrategy").refuse_kept_by(optimizer, module)


def test_a_state_of_no_parameter_is_refused() -> None:
    """A checkpoint would lose it."""
    module = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.state["total_step"] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match=r"AdamW has a state under 'total_step'.*parameter groups"):
        OriginalNames(module.named_parameters(), "SomeStrategy").rebind([optimizer], module)
