"""Calls of torch's functions that average, and what they divide by.

A mean over labels divides by the number of labels that aren't ignored, or by the sum of their classes' weights; other
losses by the number of elements; and users divide by hand, a sum by a mask's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Average:
    """What one call divides by.

    Attributes:
        name: of the function.
        given: the tensors that the divisor is computed from, or the divisor itself.
        divisor: computes it.
        divided: the call, with another divisor.
        counted: of the given tensors only the elements matter, not their shape.
        numerator: of a division.
    """

    name: str
    given: tuple[Any, ...]
    divisor: Callable[..., Tensor | float]
    divided: Callable[[Tensor | float], Tensor]
    counted: bool = True
    numerator: Tensor | None = None


OF_CLASSES = frozenset({F.cross_entropy, F.nll_loss})
OF_ELEMENTS = frozenset(
    {
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div,
        F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    }
)  # fmt: skip
LOSSES = OF_CLASSES | OF_ELEMENTS
DIVISIONS = {
    "div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__truediv__", "__itruediv__",
}  # fmt: skip


def average(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Average | None:
    """What a call divides by, if it is one that averages; None for all others."""
    if function in LOSSES:
        return _of_loss(function, args, kwargs)
    name = getattr(function, "__name__", "")
    if name == "mean":
        values = args[0] if args else None
        if len(args) > 1 or kwargs or not isinstance(values, Tensor) or not values.is_floating_point():
            return None
        exact = torch.promote_types(values.dtype, torch.float32)  # 16 bits hold no sum of many
        mean = lambda divisor: _quotient(values.sum(dtype=exact), divisor).to(values.dtype)  # noqa: E731
        return Average(name, (values,), Tensor.numel, mean)
    if name in DIVISIONS:
        numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if not (_is_scalar(numerator) and isinstance(numerator, Tensor) and _is_scalar(denominator)):
            return None
        if "rounding_mode" in kwargs or "out" in kwargs:
            return None
        dtype = torch.result_type(numerator, denominator)
        value = numerator if name.endswith("_") or not dtype.is_floating_point else numerator.to(dtype)
        in_place = name in ("div_", "divide_", "true_divide_", "__itruediv__")
        divided_by = partial(function if in_place else _quotient, value)
        return Average("division", (denominator,), lambda x: x, divided_by, False, numerator)
    return None


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_loss(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Average | None:
    how, legacy = kwargs.get("reduction"), kwargs.get("reduce") is not None or kwargs.get("size_average") is not None
    if how not in ("mean", "batchmean") or legacy:
        return None
    values, target = args[:2]
    given: tuple[Tensor, ...] = (target,)
    divisor: Callable[..., Tensor | float] = Tensor.numel
    if how == "batchmean":
        divisor = len
    elif function in OF_CLASSES and target.is_floating_point():  # probabilities
        classes = values.shape[1 if values.dim() > 1 else 0]
        divisor = lambda target: target.numel() / classes  # noqa: E731
    elif function in OF_CLASSES:
        weight, ignored = kwargs.get("weight"), kwargs.get("ignore_index", -100)
        given = (target,) if weight is None else (target, weight)
        divisor = partial(_labels, ignored=ignored)
    elif values.shape != target.shape:
        return None  # the mean is over what they are broadcast to

    def divided(by: Tensor | float) -> Tensor:
        # 16 bits hold no sum of many losses.
        exact = values.float() if values.dtype == torch.float16 else values
        total: Tensor = function(exact, target, **{**kwargs, "reduction": "sum"})
        mean = _quotient(total, by)
        as_it_was = exact is values or torch.is_autocast_enabled(values.device.type)  # which computes losses exactly
        return mean if as_it_was else mean.to(values.dtype)

    return Average(function.__name__, given, divisor, divided, counted=how == "mean")


def _quotient(total: Tensor, divisor: Tensor | float) -> Tensor:
    """As with a number of Python's: a divisor on a device changes no dtype, and isn't rounded to 16 bits."""
    if not isinstance(divisor, Tensor):
        return total / divisor
    dtype = torch.result_type(total, 1.0)
    exact = torch.promote_types(dtype, torch.float32)
    return (total.to(exact) / divisor.to(exact)).to(dtype)


def _labels(target: Tensor, weight: Tensor | None = None, *, ignored: int) -> Tensor:
    """The number of labels that count, or the sum of their classes' weights."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    each = weight.detach().double()[target.where(counts, 0).long()]  # target[counts] would wait for a GPU
    return (each * counts).sum()
