"""Runs operations on the meta device: the shapes and dtypes of their results, without memory and without arithmetic.

A deep model does the same operations on the same shapes in every layer, and the code between layers does in every
microbatch. torch computes many of these results in Python, which takes much longer than a look-up. So results are
remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.private.torch.tensors import tree_flatten, tree_unflatten


def meta_of(value: Any) -> Any:
    """A tensor's counterpart on the meta device; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided:
        return value.detach().to("meta")
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


@dataclass(frozen=True)
class _Like:
    """The properties of a tensor that an operation on the meta device reads."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Argument:
    """Stands, in an output, for the input with this index among the inputs' leaves."""

    index: int


def computed_on_meta(func: Any, leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
    """The leaves of an operation's result, tensors as meta tensors, and their structure.

    Args:
        func: an operator of torch's dispatcher.
        leaves: the leaves of its arguments, in a list; tensors may be on any device.
        spec: the structure of ``(args, kwargs)``.
    """
    if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
        return _on_meta(func, leaves, spec)
    described = tuple(_Like(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
    try:
        return _remembered(func, described, spec)
    except TypeError:  # an argument that can't be looked up
        return _on_meta(func, leaves, spec)


@lru_cache(maxsize=4096)
def _remembered(func: Any, described: tuple[Any, ...], spec: Any) -> tuple[list[Any], Any]:
    return _on_meta(func, [x if isinstance(x, _Like) else x[1] for x in described], spec)


def _on_meta(func: Any, leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
    inputs = [
        torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta") if isinstance(x, _Like) else meta_of(x)
        for x in leaves
    ]
    args, kwargs = tree_unflatten(inputs, spec)
    out, out_spec = tree_flatten(func(*args, **kwargs))
    places = {id(x): i for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    return [Argument(places[id(x)]) if id(x) in places else x for x in out], out_spec
