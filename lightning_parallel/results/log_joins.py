"""Combines the numbers that microbatches log into the number of the batch.

``reduce_fx`` says how Lightning joins batches, and only hints at how microbatches are joined: ``reduce_fx="max"`` of a
mean is the largest of the batches' means. What depends on no layer can be computed from the whole batch itself, in a
dry run of its step. Each way that gives another number is ruled out, so a second dry run is rarely needed::

    logged, of 8 samples in 4 microbatches     the ways in which it could be joined
    len(batch)            2  2  2  2           whole batch: 8        a sum
    self.global_step      5  5  5  5           whole batch: 5        a mean
    labels.max()          3  1  2  3           whole batch: 3        a maximum
    accuracy              ?                    depends on layers     by reduce_fx, a mean by default
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.absent.origins import parameter_of
from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.batch_joins import weighted_mean
from lightning_parallel.losses.graph import Number, scalar
from lightning_parallel.losses.normaliser import Rule

# What reduce_fx may be, besides a name: a function of numbers, or of a tensor.
_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (sum, torch.sum),
    "max": (max, torch.max),
    "min": (min, torch.min),
}
_WAYS = ("mean", *_FUNCTIONS)  # the first that fits is taken where nothing hints at another one
_TOLERANCE = 1e-5
_CHECKED = 5  # batches; the host waits for a GPU to look at numbers


class LogJoins:
    """Joins the numbers of microbatches, by what earlier batches have shown about each name.

    Args:
        warn: tells the user.
    """

    def __init__(self, warn: Callable[[str], None] = warnings.warn) -> None:
        self._warn = warn
        self._ways: dict[str, Sequence[str]] = {}  # by which a name's numbers may be joined
        self._checked: dict[str, int] = {}  # in how many batches a name's numbers have been looked at
        # By name: is its batch_size= the same number, whatever the batch? None: the whole batch's couldn't tell.
        self._settings: dict[str, bool | None] = {}
        self._bounded: Counter[str] = Counter()  # by name: batches seen whose batch_size= may have bounds
        self._told: set[str] = set()  # the names whose batch_size= was warned of

    def weigh(
        self,
        name: str,
        values: Sequence[Any],
        sizes: Sequence[int],
        given: Sequence[int],
        whole: Callable[[], int | None],
    ) -> tuple[Sequence[int], int]:
        """The weights of the microbatches' numbers, and that of the batch's.

        Args:
            values: as for :meth:`join`.
            sizes: of the microbatches, in samples.
            given: the user's ``batch_size=`` for them.
            whole: gives the user's ``batch_size=`` for the whole batch; None if it isn't known.
        """
        are_equal = len({*given}) == 1
        if are_equal and self._settings.get(name):
            return sizes, given[0]
        # A bound may stand for 0, as in `batch_size=int(mask.sum().clamp(min=1))`.
        bounds = (size == 1 and _is_nothing(value) for size, value in zip(given, values, strict=True))
        if len(given) > 1 and self._bounded[name] < _CHECKED and any(bounds):
            self._bounded[name] += 1
            if whole() != sum(given):
                self._bounded[name], self._settings[name] = _CHECKED, False  # as it is warned of
                self._warn(
                    f"self.log({name!r}, batch_size=...): the parts of a batch give {[*given]}. Their sum is taken, "
                    f"which the whole batch may not give: if 1 stands for a part in which nothing counts, as with "
                    f"clamp(min=1), the epoch's mean is another one. Leave the bound out, or use microbatches=1."
                )
        elif len(given) == 1:
            return given, sum(given)
        elif not any(given):  # of a count and of a setting
            return sizes, 0
        elif not are_equal and given == sizes:
            self._settings[name] = False
        elif name not in self._settings or (not are_equal and self._settings[name] is not False):
            of_whole = whole()
            fits = of_whole == sum(given) or (are_equal and of_whole == given[0])
            self._settings[name] = are_equal and (of_whole == given[0] if fits else None)
            if not fits and of_whole is not None and name not in self._told:
                self._told.add(name)
                self._warn(
                    f"self.log({name!r}, batch_size=...): the parts of a batch give {[*given]}, and the whole batch "
                    f"{of_whole}, by which an epoch's mean is weighed in one process. Give the number of samples or of "
                    f"what counts, leave batch_size out, or use microbatches=1. If it is drawn at random, all is right."
                )
            if self._settings[name]:
                return sizes, given[0]
        # Where the whole batch can't tell, one number for microbatches of different sizes is taken for a setting.
        is_guessed = are_equal and self._settings.get(name) is None
        weights = sizes if is_guessed and len({*sizes}) > 1 else given
        return weights, sum(weights)

    def join(
        self,
        name: str,
        values: Sequence[Any],
        weights: Sequence[Number],
        reduce_fx: Any,
        rule: Rule | None = None,
        whole: Callable[[], Any] | None = None,
    ) -> Any:
        """The number of the batch.

        Args:
            values: the microbatches' numbers, or tensors of one element.
            rule: the way that a trial has found; None if it isn't known.
            whole: what the whole batch logs, if it depends on no layer; None where that isn't known.
        """
        hint = _hint_of(reduce_fx)
        if len(values) == 1:
            return values[0]
        # A trial has found the rule. Only counts are trusted where the whole batch's value can be compared as well.
        if rule is not None and (whole is None or rule is Rule.COUNTS):
            if rule is Rule.SAMPLES:  # counts that happened to be 0 fit this rule too, so the mean is checked
                return self._by_hint(name, values, weights, "mean")
            return _joined("sum" if rule is Rule.SUM else "mean", values, weights)
        # Nothing to compare with.
        if whole is None or name in self._ways and not self._ways[name]:
            return self._by_hint(name, values, weights, hint)
        # Keep the ways that agree with the whole batch's value. It is computed only if they differ.
        joined = {way: _joined(way, values, weights) for way in self._ways.get(name, _WAYS)}
        numbers = [float(each) for each in joined.values()] if len(joined) > 1 else []
        if all(_are_close(each, numbers[0]) for each in numbers):
            return joined.get(hint, next(iter(joined.values())))
        expected = whole()
        if expected is None or isinstance(expected, AbsentTensor):
            of_parameters = expected is not None and not depends_on_layers(expected)
            if of_parameters and len({float(value) for value in values}) == 1:
                self._ways[name] = ["mean"]
                return _joined("mean", values, weights)
            self._ways[name] = ()
            return self._by_hint(name, values, weights, hint)
        agree = [way for way, each in joined.items() if _are_close(float(each), float(expected))]
        if agree:
            settled = hint in agree and isinstance(expected, Tensor)  # to compare them the host waits for a GPU
            self._ways[name] = [hint] if settled else agree
        return expected

    def _by_hint(self, name: str, values: Sequence[Any], weights: Sequence[Number], hint: str) -> Any:
        is_whole = isinstance(values[0], Tensor) and not values[0].is_floating_point()
        if is_whole and values[0].dtype is not torch.bool and hint in ("mean", "sum"):
            hint = "sum"  # a count: no mean of samples is an integer
        elif self._checked.get(name, 0) < _CHECKED:
            self._checked[name] = self._checked.get(name, 0) + 1
            numbers = [float(value) for value in values]
            if _is_doubtful(numbers, hint):
                self._checked[name] = _CHECKED
                self._warn(
                    f"self.log({name!r}, reduce_fx={hint!r}): the parts of a batch log {numbers}, and what the whole "
                    f"batch would log isn't known. The {hint} of these is taken. If that is "
                    f"wrong, log an object of torchmetrics, or use microbatches=1."
                )
        return _joined(hint, values, weights)


def _is_nothing(value: Any) -> bool:
    """May nothing have counted in this number?"""
    if isinstance(value, Tensor) and value.numel() != 1 or not isinstance(value, Tensor | Real):
        return False
    return math.isnan(number := float(value)) or number == 0


def depends_on_layers(value: AbsentTensor) -> bool:
    """Does the value depend on a layer's output? Otherwise it depends on parameters and present values only."""
    return any(parameter_of(origin) is None for origin in value.origins)


def _is_doubtful(numbers: Sequence[float], hint: str) -> bool:
    """May the whole batch have logged another number? Equal summands may not depend on the microbatch, fractional ones
    may be means, a mean of integers may be of counts, and a maximum may be of means."""
    equal, whole = len({*numbers}) == 1, all(number.is_integer() for number in numbers)
    if hint == "sum":
        return (equal and numbers[0] != 0) or not whole
    counts = whole and max(map(abs, numbers)) > 1
    return counts or (hint != "mean" and not equal)


def _hint_of(reduce_fx: Any) -> str:
    """The way of joining that is most like this ``reduce_fx``."""
    reduce_fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    return next((way for way, functions in _FUNCTIONS.items() if reduce_fx in (way, *functions)), "mean")


def _joined(way: str, values: Sequence[Any], weights: Sequence[Number]) -> Any:
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    tensors = [] if device is None else [scalar(value, None, device) for value in values]
    if way == "mean" and tensors:
        return weighted_mean(tensors, weights)
    if way == "mean":
        return float(weighted_mean(torch.tensor(values, dtype=torch.float64).unbind(), weights))
    of_numbers, of_a_tensor = _FUNCTIONS[way]
    return of_a_tensor(torch.stack(tensors)) if tensors else of_numbers(values)


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
