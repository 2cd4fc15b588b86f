"""Optimizer states by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.rank_states import optimizer_state


def test_the_first_parameter_by_name_is_refused_whatever_order_a_set_has() -> None:
    parameters = {f"layers.{i}.weight": torch.nn.Parameter(torch.zeros(2)) for i in range(64)}
    names = {id(parameter): name for name, parameter in parameters.items()}
    local: Any = SimpleNamespace(names=names, parameters=parameters, shards=parameters)
    optimizer = torch.optim.SGD(parameters.values())
    optimizer.state.update({parameter: {"kept": torch.zeros(3)} for parameter in parameters.values()})
    with pytest.raises(ValueError, match="'kept' of shape .* for 'layers.0.weight'"):
        optimizer_state(optimizer, local)
