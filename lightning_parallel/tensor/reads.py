"""Reads of divided parameters outside of the layers that they belong to.

A step may read parameters by itself, as an L2 penalty over ``self.parameters()`` does. Each rank would read its own
shard there, and compute a penalty of its own. Comparing the ranks' losses may miss it: shards of ones and zeros have
equal norms at the start, and a small penalty is lost in rounding. So the calls of torch's functions are watched. A call
that computes with a divided parameter while no method of its layer runs is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_parallel.private.torch import tensors_in
from lightning_parallel.tensor.functions import has_memory


class ReadsOfShards(TorchFunctionMode):
    """Inside, records functions that read a divided parameter (one of ``names``) and through which a gradient flows
    back.

    Attributes:
        found: the functions that read a parameter, by its name.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        for name in names:
            owner, _, own = name.rpartition(".")
            holder = module.get_submodule(owner)
            parameter = getattr(holder, own)
            if isinstance(parameter, Tensor) and parameter.requires_grad and has_memory(parameter):
                self._names.setdefault(id(parameter), name)
                self._owners.setdefault(id(parameter), []).append(holder)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        given = [id(tensor) for tensor in tensors_in((args, kwargs)) if id(tensor) in self._names]
        # A result without a gradient (a shape, a copy for an average) can't change what is trained.
        made = given and any(t.requires_grad and id(t) not in self._names for t in tensors_in(result))
        for key in given if made else ():
            if not _runs(self._owners[key]):
                self.found.setdefault(self._names[key], resolve_name(func) or getattr(func, "__name__", str(func)))
        return result


def _runs(owners: list[nn.Module]) -> bool:
    """Is a method of one of these modules running? The stack is searched, since ``layer.forward(x)`` calls no hooks."""
    frame = inspect.currentframe()
    while frame is not None:
        if any(frame.f_locals.get("self") is owner for owner in owners):
            return True
        frame = frame.f_back
    return False
