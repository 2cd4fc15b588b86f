"""Compares plain values, as modules and optimizers keep them: numbers, texts, tensors, and tuples or lists of these.
Finds the numbers among them. Puts other values into dictionaries for a time. Finds words for error messages: a
shortened list of names, and the line that is running."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))
_SHOWN = 5  # names in an error message


def same_value(one: Any, other: Any) -> bool:
    """Are two values equal? Of an object that isn't plain, only the object itself is the same. Tensors are read, for
    which the host waits for a GPU."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.layout is not torch.strided or one.shape != other.shape:
            return one.layout is not torch.strided  # of another layout, it can't be compared, and is hardly written to
        return torch.equal(one.to(other.device), other)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, PLAIN) and bool(one == other)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The real numbers among some values, and in tensors of one element."""
    return {
        str(name): float(value.detach() if isinstance(value, Tensor) else value)
        for name, value in values.items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    }


@contextmanager
def changed(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside, dictionaries have other values. A change is a dictionary, such as the ``vars`` of an object, a key, and
    the value that it gets."""
    changes = list(changes)
    before = [{key: store[key]} if key in store else {} for store, key, _ in changes]
    try:
        for store, key, value in changes:
            store[key] = value
        yield
    finally:
        for (store, key, _), held in zip(changes, before, strict=True):
            if not held:
                store.pop(key, None)  # uncovers what an object's class has
            store.update(held)


def first_few(names: Iterable[str]) -> str:
    """The first few of some names, for an error message."""
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def line_outside(packages: Container[str]) -> str:
    """The line that is running, of code that is in none of these packages. A thread of torch's has none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        frame = frame.f_back
    if frame is None:
        return "Something"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})"
