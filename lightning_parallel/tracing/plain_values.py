"""Finds the code that uses non-tensor attributes of modules: a trace can't follow a number as it follows a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

OnUse = Callable[[nn.Module, str, bool], None]


@contextmanager
def attribute_uses(attributes: Mapping[nn.Module, set[str]], on_use: OnUse) -> Iterator[None]:
    """Inside, ``on_use`` is called before each use of these attributes (their names, by module), with the module, the
    attribute's name, and whether it is assigned to. Python looks for ``__getattribute__`` on the class, so each module
    is of a subclass of its class meanwhile."""
    kinds: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for part, names in attributes.items():
            kind = type(part)
            if isinstance(part, torch.jit.ScriptModule):
                continue
            kinds.append((part, kind))
            part.__class__ = _telling(kind, names, on_use)
        yield
    finally:
        for part, kind in kinds:
            part.__class__ = kind


def _telling(kind: type[nn.Module], names: set[str], on_use: OnUse) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        if name in names:
            on_use(self, name, False)
        return kind.__getattribute__(self, name)

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if name in names:
            on_use(self, name, True)
        kind.__setattr__(self, name, value)

    methods = {"__getattribute__": read, "__setattr__": assign, "__module__": kind.__module__}
    # The user's classes aren't told of a subclass: they may register or refuse it. A base set later isn't told.
    telling: type[nn.Module] = type.__new__(type(kind), kind.__name__, (_Plain,), methods)
    try:
        telling.__bases__ = (kind,)
    except TypeError:  # its objects are laid out otherwise, with slots: then the class is told
        telling = type(kind)(kind.__name__, (kind,), methods)  # type: ignore[misc]
    return telling


class _Plain(nn.Module):
    """A class whose objects have the memory layout of other modules."""
