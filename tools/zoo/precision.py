"""One precision for everything in a model, so that rounding doesn't hide or make a difference.

Models of transformers cast to float32 in their norms, softmaxes, routers and losses, whatever they are trained in. A
rounding to float32 that goes the other way once in a million times is larger than what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]
CASTS = (torch.float32, "torch.FloatTensor", torch.FloatTensor)


@contextmanager
def everything_in(dtype: torch.dtype) -> Iterator[None]:
    """``dtype`` as the default, and casts of float64 tensors to float32 that leave them as they are."""
    torch.set_default_dtype(dtype)
    with ExitStack() as patches:
        for name in ("to", "type"):
            patches.enter_context(patch.object(Tensor, name, _without_casts(getattr(Tensor, name))))
        for name in ("softmax", "log_softmax"):
            patches.enter_context(patch.object(F, name, _without_casts(getattr(F, name))))
        patches.enter_context(patch.object(Tensor, "float", _float(Tensor.float)))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def _float(original: Function) -> Function:
    def to_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.dtype == torch.float64 else original(tensor, *args, **kwargs)

    return to_float


def _without_casts(original: Function) -> Function:
    """A function of a tensor that takes float64 for float32, if the tensor is of float64."""

    def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64:
            args = tuple(_float64(argument) for argument in args)
            kwargs = {key: _float64(value) for key, value in kwargs.items()}
        return original(tensor, *args, **kwargs)

    return function


def _float64(argument: Any) -> Any:
    is_cast = isinstance(argument, torch.dtype | str | type) and argument in CASTS
    return torch.float64 if is_cast else argument
