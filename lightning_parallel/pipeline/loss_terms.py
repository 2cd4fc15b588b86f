"""A batch's loss from microbatches, where it isn't a mean over samples.

A batch in microbatches of sizes s_k has the loss sum_k s_k / s * loss_k. That is the loss of the undivided batch if the
loss is a mean over samples. A language model's is a mean over labels that aren't ignored, and their number n_k isn't
the same in all microbatches::

    samples  labels that count   mean over labels      divided here by
    0, 1     12                  sum_0 / 12            16 * 2 / 4 = 8
    2, 3      4                  sum_1 /  4            16 * 2 / 4 = 8        2/4 * sum_0/8 + 2/4 * sum_1/8 = sum / 16

So each such *term* of the loss is divided by the batch's number, shared out by samples. Several terms may count
different things, and what a step logs is right by the same token. While the first microbatch of a batch runs on the
last stage, the code around the layers is watched (:class:`Recording`). At a call that averages, the other
microbatches' numbers are computed as the user's code would (``replay.py``). In the other microbatches the same calls,
in the same order, get their divisors (:class:`Playing`), if any term needs it.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.batch import tensors
from lightning_parallel.pipeline.replay import Known, Record, leaves_of
from lightning_parallel.torch_private import current_function_mode, tree_leaves

Warn = Callable[[str, str], None]  # a key, of which the first warning is shown, and the words

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PROBABLY_EQUAL = 1e-6  # relative; sums of class weights are rounded


# -- calls that average ----------------------------------------------------------------------------------------------


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
    divided: Callable[[float], Tensor]
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
_DIVISIONS = {
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
        return Average(name, (values,), Tensor.numel, lambda divisor: values.sum() / divisor)
    if name in _DIVISIONS:
        numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if not (_is_scalar(numerator) and isinstance(numerator, Tensor) and _is_scalar(denominator)):
            return None
        if "rounding_mode" in kwargs or "out" in kwargs:
            return None
        dtype = torch.result_type(numerator, denominator)
        value = numerator if name.endswith("_") or not dtype.is_floating_point else numerator.to(dtype)
        return Average("division", (denominator,), lambda x: x, partial(function, value), False, numerator)
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

    def divided(by: float) -> Tensor:
        # 16 bits hold no sum of many losses.
        exact = values.float() if values.dtype == torch.float16 else values
        total: Tensor = function(exact, target, **{**kwargs, "reduction": "sum"})
        return (total / by).to(values.dtype) if exact is not values else total / by

    return Average(function.__name__, given, divisor, divided, counted=how == "mean")


def _labels(target: Tensor, weight: Tensor | None = None, *, ignored: int) -> Tensor:
    """The number of labels that count, or the sum of their classes' weights."""
    counts = target != ignored
    return counts.sum() if weight is None else weight.detach()[target[counts]].sum()


# -- the terms of a batch --------------------------------------------------------------------------------------------


@dataclass
class Term:
    """One call that averages, in all microbatches of a batch.

    Attributes:
        name: of its function.
        place: where the user's code calls it.
        divisors: of each microbatch by itself; None if they can't be known ahead.
        total: of the batch.
        shared: what is divided grows with the number of samples, so the total is shared out by samples.
        each: what was seen first of a divisor that can't be known ahead, for each sample.
    """

    name: str
    place: str
    divisors: list[float] | None = None
    total: float = 0.0
    shared: bool = True
    each: float | None = None

    def __str__(self) -> str:
        return f"The {self.name} at {self.place}"


class LossTerms:
    """The terms of one batch's loss.

    Args:
        batch: as the user's loader gave it.
        parts: its microbatches.
        sizes: of the microbatches.
        apart: modules inside which nothing is watched: their results are the model's.
        warn: shows a warning, each key's once.
        checks: compare each divisor with what was foreseen. On a GPU the host has to wait for it.
    """

    def __init__(
        self,
        batch: Any,
        parts: Sequence[Any],
        sizes: Sequence[int],
        *,
        apart: Iterable[nn.Module],
        warn: Warn,
        checks: bool,
    ) -> None:
        self._batch, self._parts = batch, parts
        self.sizes, self.size = sizes, sum(sizes)
        self.warn, self.checks = warn, checks
        self._apart = apart
        self.terms: list[Term | None] = []  # a place for each call of a function that may average
        self._recorded = False

    def watched(self, number: int) -> AbstractContextManager[Watching | None]:
        """Around the step of a microbatch.

        Args:
            number: of the microbatch, within the batch. The first one that runs is recorded.
        """
        if not self._recorded:
            self._recorded = True
            return self._during(Recording(self, number, list(tensors(self._parts[number]))))
        if any(self._needs_watching(term) for term in self.terms):
            return self._during(Playing(self, number))
        return nullcontext()

    @contextmanager
    def _during(self, mode: Watching) -> Iterator[Watching]:
        with mode, _absent_from(mode, self._apart):
            yield mode
        mode.end()

    def _needs_watching(self, term: Term | None) -> bool:
        if term is None:
            return False
        if term.divisors is None:
            return self.checks
        return any(self.divisor(term, k) is not None for k in range(len(self.sizes)))

    def divisor(self, term: Term, number: int) -> float | None:
        """By what a term is divided in a microbatch; None for what its call divides by itself."""
        if term.divisors is None or not term.total:
            return None  # 0 / 0 is not a number, as in one process
        divisor = term.total * self.sizes[number] / self.size if term.shared else term.total
        return None if divisor == term.divisors[number] else divisor

    def foreseen(self, record: Record, average: Average, wanted: list[int | Known | None]) -> list[float] | None:
        """The divisors of all microbatches, and of a division's batch; None if they can't be computed ahead."""
        program = record.program((number for number in wanted if number is not None), counted=average.counted)
        batches = [*self._parts, self._batch] if average.numerator is not None else self._parts
        found: list[Tensor | float] = []
        try:
            for batch in batches:
                computed = iter(program.run(list(tensors(batch))))
                given = (
                    constant if number is None else next(computed)
                    for number, constant in zip(wanted, average.given, strict=True)
                )
                found.append(average.divisor(*given))
        except Exception:  # whatever the user's functions raise for a batch that they weren't written for
            return None
        return numbers(found)


def numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Scalars as numbers. The host waits for a GPU once."""
    scalars = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    known = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(known) if isinstance(value, Tensor) else float(value) for value in values]


# -- watching a step -------------------------------------------------------------------------------------------------


class Watching(TorchFunctionMode):
    """Sees torch's functions in a step, outside the layers.

    Args:
        terms: of the batch.
        number: of the microbatch.
    """

    def __init__(self, terms: LossTerms, number: int) -> None:
        super().__init__()
        self.terms, self.number = terms, number
        self._depth = 0  # of modules in which it doesn't watch
        self._left = False
        self._divided: dict[int, Tensor] = {}  # results that depend on another divisor than the call's own, by id
        self._numbers: set[float] = set()  # those that left torch

    @torch.compiler.disable
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._depth:
            return func(*args, **kwargs)
        found = average(func, args, kwargs)
        output = self.call(func, args, kwargs, found)
        if self._divided:
            self._follow(args, output)
        return output

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Average | None
    ) -> Any:
        """One call of the user's code, which averages as ``found`` says."""
        raise NotImplementedError

    def is_divided(self, value: Any) -> bool:
        """Was a value computed from a term that another divisor was given? Then its mean over microbatches is weighted
        by samples, whatever the user's own weights are."""
        if isinstance(value, Tensor):
            return id(value) in self._divided
        return isinstance(value, float) and value in self._numbers

    def divided(self, average: Average, term: Term, function: Callable[[], Tensor]) -> Tensor:
        """The term in this microbatch."""
        divisor = self.terms.divisor(term, self.number)
        if divisor is None:
            return function()
        output = average.divided(divisor)
        self._divided[id(output)] = output
        return output

    def _follow(self, args: tuple[Any, ...], output: Any) -> None:
        if not any(id(leaf) in self._divided for leaf in leaves_of(args)):
            return
        if isinstance(output, float):
            self._numbers.add(output)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._divided[id(leaf)] = leaf

    def end(self) -> None:
        """After the step."""
        self._divided, self._numbers = {}, set()

    def leave(self) -> None:
        """A module is entered in which nothing is watched."""
        self._depth += 1
        if self._depth == 1 and current_function_mode() is self:  # else a mode of the user's lies on top
            self._left = True
            super().__exit__(None, None, None)

    def return_with(self, output: Any) -> None:
        """That module has returned."""
        self._depth -= 1
        if self._depth == 0 and self._left:
            self._left = False
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self._left:
            super().__exit__(*error)


class Playing(Watching):
    """A microbatch after the first one, whose terms are known. Arguments as for :class:`Watching`."""

    def __init__(self, terms: LossTerms, number: int) -> None:
        super().__init__(terms, number)
        self._calls = 0

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Average | None
    ) -> Any:
        if found is None:
            return function(*args, **kwargs)
        place, self._calls = self._calls, self._calls + 1
        term = self.terms.terms[place] if place < len(self.terms.terms) else None
        if term is None:
            return function(*args, **kwargs)
        if term.name != found.name:
            raise _changed(f"The loss is made of other calls in microbatch {self.number} than in the first one")
        if self.terms.checks:
            (own,) = numbers([found.divisor(*found.given)])
            check(self.terms, term, self.number, own)
        return self.divided(found, term, partial(function, *args, **kwargs))

    def end(self) -> None:
        super().end()
        if self._calls != len(self.terms.terms):
            raise _changed(
                f"The step makes {self._calls} calls that average in microbatch {self.number}, but "
                f"{len(self.terms.terms)} in the first one"
            )


def check(terms: LossTerms, term: Term, number: int, own: float) -> None:
    """Compare a term's own divisor in a microbatch with what is known of it.

    Raises:
        RuntimeError: another one was foreseen.
    """
    if term.divisors is not None:
        foreseen = term.divisors[number]
        if not nearly(own, foreseen):
            raise _changed(
                f"{term} averages over {own:g} in microbatch {number}, but {foreseen:g} was computed from the batch "
                f"beforehand"
            )
        return
    each = own / terms.sizes[number]
    if term.each is None:
        term.each = each
    elif not nearly(each, term.each):
        terms.warn(
            f"{term}",
            f"{term} averages over a number that differs between samples and that can't be computed from the batch "
            f"before the step runs, since it depends on random numbers, on the model, or on values that Python has "
            f"read. So microbatches are weighted by their samples, and the loss isn't that of the undivided batch. "
            f"Give the strategy microbatch_weight, a function of a batch that returns the number, or microbatches=1.",
        )


def nearly(a: float, b: float) -> bool:
    """Equal but for rounding."""
    return abs(a - b) <= _PROBABLY_EQUAL * max(abs(a), abs(b))


def _changed(problem: str) -> RuntimeError:
    return RuntimeError(
        f"{problem}. The loss of the batch can't be computed in microbatches like this. Give the strategy "
        f"microbatch_weight, a function of a batch that returns what its loss averages over, or microbatches=1."
    )


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
            if own is None or nearly(own, divisors[self.number]):
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
        results = [x for x in tree_leaves(output) if isinstance(x, Tensor) and self._record.is_foreign(x)]
        if not results:
            return
        given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
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
            masks = [x for x in leaves_of(args[1]) if isinstance(x, Tensor) and x.dtype == torch.bool]
            if masks:
                register = self._record.register(masks[0]) if len(masks) == 1 else None
                return "unknown" if register is None else register
        return next((mask for mask in map(self._mask, given) if mask is not None), None)


def _factor(name: str, args: tuple[Any, ...]) -> float | None:
    """The number that a call divides by."""
    number = next((x for x in args if isinstance(x, int | float) and not isinstance(x, bool)), None)
    if not number:
        return None
    if name in _DIVISIONS:
        return float(number)
    return 1 / number if name in ("mul", "mul_", "__mul__", "__rmul__", "multiply") else None


def _is_multiple(number: float, size: int) -> bool:
    """May it have been computed from a number of samples?"""
    times = number / size
    return round(times) > 0 and abs(times - round(times)) < _PROBABLY_EQUAL * times


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


@contextmanager
def _absent_from(mode: Watching, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the mode doesn't watch what the modules do."""

    @torch.compiler.disable
    def before(module: nn.Module, args: Any) -> None:
        mode.leave()

    @torch.compiler.disable
    def after(module: nn.Module, args: Any, output: Any) -> None:
        mode.return_with(output)

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
