"""Finds the non-tensor attributes of modules that a step changes, and the code that uses them: a trace can't follow a
number as it follows a tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.tracing.snapshot import StateKept, is_method

Attribute = tuple[int, str]  # its part's id, and its name
OnUse = Callable[[nn.Module, str, bool], None]


@dataclass(frozen=True)
class ChangedAttributes:
    """The attributes that have changed at a moment of a step.

    Attributes:
        written: the attributes of units, and numbers of the code around them.
        shared: the attributes that several units share.
        followed: those of ``written`` and ``shared`` that hold absent tensors, whose origins are followed anyway.
    """

    written: set[Attribute]
    shared: set[Attribute]
    followed: set[Attribute]

    @classmethod
    def now(cls, module: nn.Module, state: StateKept, owners: Mapping[int, Collection[str]]) -> ChangedAttributes:
        """Those that differ now from ``state``. ``owners`` has the names of the units that have a part, by its id."""
        values = {
            (id(part), name): value_of(part, name)
            for part in module.modules()
            if not isinstance(part, Metric)
            for name in vars(part).keys() | buffers_of(part).keys()
            if not is_method(part, name)
        }
        written, shared = state.written_plainly() & values.keys(), state.shared_by(owners) & values.keys()
        written = {key for key in written if key[0] in owners or isinstance(values[key], Number)}
        return cls(written, shared, {key for key in written | shared if state.has_absent(values[key])})


def value_of(part: nn.Module, attribute: str) -> Any:
    return vars(part).get(attribute, buffers_of(part).get(attribute))


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
