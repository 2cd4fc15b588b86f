"""Finds the code that uses non-tensor attributes of modules: a trace can't follow a number as it follows a tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

OnUse = Callable[[nn.Module, str, bool], None]


@contextmanager
def attribute_uses(parts: Collection[nn.Module], on_use: OnUse) -> Iterator[None]:
    """Inside, ``on_use`` is called before each use of an attribute of these parts, with the part, the attribute's name,
    and whether it is assigned to or deleted. Python looks for the methods that do this on the class, so they are
    replaced there, for all objects of it. The user's classes would see a subclass that is made for these parts
    (``__init_subclass__``), and may register or refuse it."""
    ids = set(map(id, parts))
    kinds = {type(part) for part in parts if not isinstance(part, torch.jit.ScriptModule)}
    # All are made before the first is set: a class may inherit its methods from another one.
    methods = [(kind, name, method) for kind in kinds for name, method in _telling(kind, ids, on_use)]
    with ExitStack() as put_back:
        for kind, name, method in methods:
            if name in vars(kind):
                put_back.callback(type.__setattr__, kind, name, vars(kind)[name])
            else:
                put_back.callback(type.__delattr__, kind, name)
            type.__setattr__(kind, name, method)
        yield


def _telling(kind: type[nn.Module], ids: Container[int], on_use: OnUse) -> Iterator[tuple[str, Any]]:
    get, assign, remove = kind.__getattribute__, kind.__setattr__, kind.__delattr__

    def tell(part: nn.Module, name: str, assigned: bool) -> None:
        if type(part) is kind and id(part) in ids:  # else a subclass has told
            on_use(part, name, assigned)

    def read(self: nn.Module, name: str) -> Any:
        tell(self, name, False)
        return get(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        tell(self, name, True)
        assign(self, name, value)

    def delete(self: nn.Module, name: str) -> None:
        tell(self, name, True)
        remove(self, name)

    yield "__getattribute__", read
    yield "__setattr__", write
    yield "__delattr__", delete
