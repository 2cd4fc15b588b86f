"""Finds the terms of a loss, while the first microbatch of a batch runs."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.averaging import DIVISIONS, LOSSES, OF_CLASSES, Average
from lightning_parallel.pipeline.batch_record import Record
from lightning_parallel.pipeline.loss_terms import LossTerms, Term, check, nearly, numbers
from lightning_parallel.pipeline.replay import Known, tensors_of
from lightning_parallel.pipeline.watching import Watching

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class _Kind(Enum):
    """What is known of a tensor that comes from the model."""

    WEIGHTS = "of parameters alone, the same in every microbatch"
    SUM = "a sum over the samples"
    MEAN = "a mean over the samples"
    OTHER = "anything else"


class Recording(Watching):
    """The first microbatch: finds the terms.

    Args:
        terms: of the batch.
        number: of the microbatch.
        leaves: the microbatch's tensors, in order.
    """

    def __init__(self, terms: LossTerms, number: int, leaves: Sequence[Tensor]) -> None:
        super().__init__(terms, number)
        self._record = Record(leaves)
        self._kinds: dict[int, tuple[weakref.ref[Tensor], _Kind]] = {}
        self._chosen: dict[int, tuple[weakref.ref[Tensor], int | str]] = {}  # by which mask samples were picked

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Average | None
    ) -> Any:
        if found is None:
            output = function(*args, **kwargs)
        else:
            term = self._term(function, found, args)
            self.terms.terms.append(term)
            plain = partial(function, *args, **kwargs)
            output = plain() if term is None else self.divided(found, term, plain)
        output = self._record.note(function, args, kwargs, output)
        self._classify(function, args, kwargs, found, output)
        return output

    def return_with(self, output: Any) -> None:
        self._record.mark_foreign(output)
        super().return_with(output)

    def end(self) -> None:
        super().end()
        self._record.end()

    def check_loss(self, loss: Tensor) -> None:
        """Warn of a loss that is a sum over the batch."""
        if self._kind(loss) is _Kind.SUM:
            self.terms.warn(
                "sum",
                f"The loss is a sum over the batch. Microbatches' losses are averaged, so it is that of one microbatch "
                f"of {self.size_here} samples, not of all {self.terms.size}. Divide it by the number of samples, or "
                f"use microbatches=1.",
            )

    @property
    def size_here(self) -> int:
        """The number of samples of the microbatch."""
        return self.terms.sizes[self.number]

    # -- terms -----------------------------------------------------------------------------------------------------

    def _term(self, function: Callable[..., Any], found: Average, args: tuple[Any, ...]) -> Term | None:
        """The term that a call is; None if it averages over the samples, or depends on the batch alone."""
        record = self._record
        if found.numerator is not None:
            return self._of_division(found, found.numerator)
        if not any(record.is_foreign(x) for x in args if isinstance(x, Tensor)):
            return None
        chosen = next((x for x in args if isinstance(x, Tensor) and self._mask(x) is not None), None)
        if function not in OF_CLASSES and chosen is not None:
            return self._of_chosen(found, chosen)
        if function not in LOSSES:
            return None
        register = record.register(found.given[0])
        from_sizes = register is not None and not record.program([register]).reads_batch
        if function not in OF_CLASSES:
            return None if register is None or from_sizes else self._known(found, [register])
        if from_sizes:
            if self.terms.checks:  # it reads them
                self._warn_of_negatives(found, args[0])
            return None
        weights = found.given[1:]
        if register is None or any(record.is_foreign(weight) for weight in weights):
            return self._known(found, None)
        return self._known(found, [register, *map(record.register, weights)])

    def _of_chosen(self, found: Average, values: Tensor) -> Term:
        """A mean over elements that a mask has picked."""
        mask = self._mask(values)
        if not isinstance(mask, int):
            return self._known(found, None)
        given = self._record.tensor(mask)
        picked = int(given.sum())
        each = values.numel() / picked if picked else values.shape[1:].numel()
        return self._known(replace(found, given=(given,), divisor=lambda mask: mask.sum() * each), [mask])

    def _of_division(self, found: Average, numerator: Tensor) -> Term | None:
        record, (denominator,) = self._record, found.given
        kind = self._kind(numerator)
        if not record.is_foreign(numerator) or kind not in (_Kind.SUM, _Kind.MEAN):
            return None
        wanted: int | Known | None
        if isinstance(denominator, Tensor):
            wanted = record.register(denominator)
            if denominator.requires_grad or (wanted is None and not record.is_foreign(denominator)):
                return None  # the model's, or a constant
        else:
            wanted = denominator if isinstance(denominator, Known) and denominator.record is record else None
            if wanted is None and not record.was_read(denominator):
                return None
            if wanted is not None and not record.program([wanted]).reads_batch:
                return None  # a number of samples, or of elements
        return self._known(found, None if wanted is None else [wanted], shared=kind is _Kind.SUM)

    def _known(self, found: Average, wanted: list[int | Known | None] | None, shared: bool = True) -> Term:
        """The term, with the divisors of all microbatches if they can be computed.

        Args:
            found: what the call divides by.
            wanted: where that comes from: registers, and None for constants. None if it can't be known.
            shared: as in :class:`Term`.
        """
        own = numbers([found.divisor(*found.given)])[0] if self.terms.checks and found.given else None
        divisors = None if wanted is None else self.terms.foreseen(self._record, found, wanted)
        if divisors is not None:
            total = divisors.pop() if found.numerator is not None else sum(divisors)
            if own is None or nearly(own, float(divisors[self.number])):
                return Term(found.name, _place(), divisors, total, shared)
        term = Term(found.name, _place())
        if own is not None:
            check(self.terms, term, self.number, own)
        return term

    def _warn_of_negatives(self, found: Average, logits: Tensor) -> None:
        """The targets don't depend on what is in the batch: its samples may be each other's classes."""
        (target, *_) = found.given
        if logits.dim() != 2 or target.dim() != 1:
            return
        rows, classes = logits.shape
        each_its_own = rows == classes and rows % self.size_here == 0 and target.unique().numel() == rows
        two_views = rows == 2 * self.size_here and classes == rows - 1
        if each_its_own or two_views:
            self.terms.warn(
                "negatives",
                f"The {found.name} at {_place()} compares the samples of a batch with each other. In microbatches each "
                f"sample is compared with {self.size_here - 1} others, not with {self.terms.size - 1}: use "
                f"microbatches=1.",
            )

    # -- what is known of the model's tensors ------------------------------------------------------------------------

    def _kind(self, tensor: Tensor) -> _Kind:
        known = self._kinds.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        is_weight = tensor.is_leaf and tensor.requires_grad and not self._record.is_marked(tensor)
        return _Kind.WEIGHTS if is_weight else _Kind.OTHER

    def _mask(self, tensor: Tensor) -> int | str | None:
        """The register of the mask that has picked a tensor's elements, or "unknown"; None if none has."""
        known = self._chosen.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _classify(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Average | None,
        output: Any,
    ) -> None:
        results = [tensor for tensor in tensors_of(output) if self._record.is_foreign(tensor)]
        if not results:
            return
        given = tensors_of((args, kwargs))
        kind = self._result_kind(function, args, kwargs, found, given)
        mask = self._choice(getattr(function, "__name__", ""), args, given)
        for result in results:
            self._kinds[id(result)] = weakref.ref(result), kind
            if mask is not None and result.dim():
                self._chosen[id(result)] = weakref.ref(result), mask

    def _result_kind(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Average | None,
        given: list[Tensor],
    ) -> _Kind:
        foreign = [self._kind(x) for x in given if self._record.is_foreign(x)]
        kinds = {kind for kind in foreign if kind is not _Kind.WEIGHTS}
        if not kinds and not any(self._record.register(x) is not None for x in given):
            return _Kind.WEIGHTS
        name = getattr(function, "__name__", "")
        if found is not None and found.numerator is None:
            return _Kind.SUM if _Kind.SUM in kinds else _Kind.MEAN
        if found is not None and self.terms.terms[-1] is not None:
            return _Kind.MEAN
        if name in ("sum", "nansum") or (function in LOSSES and kwargs.get("reduction") == "sum"):
            whole = function in LOSSES or given[0].dim() == 0 or not (args[1:] or kwargs.get("dim") is not None)
            if _Kind.SUM in kinds or kinds == {_Kind.MEAN}:
                return _Kind.SUM if _Kind.SUM in kinds else _Kind.MEAN
            return _Kind.SUM if whole or given[0].dim() == 1 else _Kind.OTHER
        if _Kind.SUM in kinds:
            factor = _factor(name, args)
            return _Kind.MEAN if factor is not None and _is_multiple(factor, self.size_here) else _Kind.SUM
        if name in ("mean", "nanmean") and _reduces_first(args, kwargs):
            return _Kind.MEAN
        return _Kind.MEAN if kinds == {_Kind.MEAN} else _Kind.OTHER

    def _choice(self, name: str, args: tuple[Any, ...], given: list[Tensor]) -> int | str | None:
        """As :meth:`_mask`, of a result."""
        if name in ("__getitem__", "masked_select") and len(args) > 1:
            masks = [tensor for tensor in tensors_of(args[1]) if tensor.dtype == torch.bool]
            if masks:
                register = self._record.register(masks[0]) if len(masks) == 1 else None
                return "unknown" if register is None else register
        return next((mask for mask in map(self._mask, given) if mask is not None), None)


def _factor(name: str, args: tuple[Any, ...]) -> float | None:
    """The number that a call divides by."""
    number = next((x for x in args if isinstance(x, int | float) and not isinstance(x, bool)), None)
    if not number:
        return None
    if name in DIVISIONS:
        return float(number)
    return 1 / number if name in ("mul", "mul_", "__mul__", "__rmul__", "multiply") else None


def _is_multiple(number: float, size: int) -> bool:
    """May it have been computed from a number of samples?"""
    times = number / size
    return round(times) > 0 and abs(times - round(times)) < 1e-6 * times


def _reduces_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None:
        return True
    count = args[0].dim()
    return any(dim % max(count, 1) == 0 for dim in ([dims] if isinstance(dims, int) else dims))


def _place() -> str:
    """Where the user's code calls the function that is being watched: the innermost line outside torch and this
    package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
