"""Uses of attributes are told, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.tracing.plain_values import attribute_uses


class Registered(nn.Module):
    """Its class wants to know of each subclass."""

    known: list[str] = []

    def __init_subclass__(cls, *, tag: str, **kwargs: object) -> None:
        Registered.known.append(tag)


class Final(type):
    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, object]) -> Final:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("a final class")
        return super().__new__(cls, name, bases, names)


class Finished(nn.Module, metaclass=Final):
    pass


class Slots(nn.Module):
    __slots__ = ("extra",)


@pytest.mark.parametrize("kind", [nn.Linear, Registered, Finished, Slots])
def test_uses_are_told_in_their_order_and_the_class_neither_notices_nor_stays_another(kind: Any) -> None:
    module, told = kind(2, 2) if kind is nn.Linear else kind(), []
    module.value, module.other = 1, 2
    module.register_buffer("count", torch.zeros(()))
    attributes = {module: {"value", "count"}}
    with pytest.raises(KeyError), attribute_uses(attributes, lambda part, *use: told.append((part is module, *use))):
        assert isinstance(module, kind) and type(module).__name__ == kind.__name__
        module.value += module.other
        module.count += 1
        raise KeyError
    assert told[:4] == [(True, name, assigned) for name in ("value", "count") for assigned in (False, True)]
    assert type(module) is kind and module.value == 3 and module.count == 1 and Registered.known == []
