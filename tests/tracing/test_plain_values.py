"""Uses of attributes are told, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.tracing.plain_values import attribute_uses


class Wrapped(nn.Linear):
    """Has one of the two methods itself, and inherits from a class that is watched, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def test_uses_are_told_in_their_order_and_classes_are_as_before() -> None:
    modules, told = [Wrapped(2, 2), nn.Linear(2, 2)], []
    before = [dict(vars(kind)) for kind in (Wrapped, nn.Linear)]
    for module in modules:
        module.value, module.other = 1, 2
        module.register_buffer("count", torch.zeros(()))
    with pytest.raises(KeyError), attribute_uses(modules[:1], lambda *use: told.append(use)):
        for module in modules:
            module.value += module.other  # type: ignore[operator]
            module.count += 1  # type: ignore[operator]
        raise KeyError
    uses = [(modules[0], name, assigned) for name in ("value", "count") for assigned in (False, True)]
    assert [*dict.fromkeys(use for use in told if use in uses)] == uses  # torch's own method may read, too
    assert (modules[0], "other", False) in told and all(part is modules[0] for part, *_ in told)
    assert [module.value for module in modules] == [3, 3]
    assert before == [dict(vars(kind)) for kind in (Wrapped, nn.Linear)]
