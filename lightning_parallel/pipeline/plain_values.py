"""Who reads what modules keep besides tensors: a look at a step can't follow a number as it follows a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Told = Callable[[nn.Module, str, bool], None]


@contextmanager
def uses_told(attributes: Mapping[nn.Module, set[str]], told: Told) -> Iterator[None]:
    """Inside, each use of these attributes is told. A module is then of a subclass of its class: only a class can see
    how its attributes are used.

    Args:
        attributes: their names, by module.
        told: called before it is used with the module, the attribute's name, and whether it is assigned to.
    """
    kinds: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for part, names in attributes.items():
            if not isinstance(part, torch.jit.ScriptModule):
                kinds.append((part, type(part)))
                part.__class__ = _telling(type(part), names, told)
        yield
    finally:
        for part, kind in kinds:
            part.__class__ = kind


def _telling(kind: type[nn.Module], names: set[str], told: Told) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        if name in names:
            told(self, name, False)
        return kind.__getattribute__(self, name)

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if name in names:
            told(self, name, True)
        kind.__setattr__(self, name, value)

    methods = {"__getattribute__": read, "__setattr__": assign, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)
