"""Normalises a batch's loss and gradients when microbatches average over different numbers.

A language model's loss is a mean over the labels that count, and their number n_k isn't the same in all microbatches.
The batch's number N is known only when the last one has run its forward; by then most backwards have run. So each
backward begins with 1 / reference, and the summed gradients are multiplied by reference / N at the end::

    microbatch     labels n_k      its backward begins below the loss's division, at the sum over its labels, with
    0              12              1 / reference          reference = 12 * 3, a guess from the first one
    1               0              1 / reference          nothing counts: it adds nothing
    2               4              1 / reference
                   N = 16          then all gradients times reference / N = 36 / 16

``graph.py`` and ``counts.py`` read n_k off each microbatch's own graph. The last stage sends the factor along with the
gradients, so every stage has it before its last backward of the batch. Where losses are means over samples it is 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from math import inf, isclose, isnan, log2, nan
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.batch_joins import weighted_mean
from lightning_parallel.losses.counts import count_of, main_of, may_count, ratio_of, ratios_of
from lightning_parallel.losses.graph import Number, Term, all_terms_of, inverse, number_of, scalar
from lightning_parallel.private.torch.autograd import like_edge

_EQUAL = 1e-6  # relative; sums of class weights are rounded


class Rule(Enum):
    """How the losses of microbatches become that of a batch."""

    COUNTS = "a mean by what each of them averages over"
    SAMPLES = "a mean by samples"
    SUM = "a sum"


class BatchLoss:
    """The loss of one batch. Every rank has one; losses are added on the last stage.

    Args:
        given: what each loss averages over, if the user has said so, instead of samples.
        batches: that an update's gradients are the mean of.

    Attributes:
        weights: of the losses of the microbatches that have run, in their order.
        factor: by what the sum of the microbatches' gradients has to be multiplied, when all of them have run.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rule: Rule = Rule.SAMPLES,
        given: Sequence[float] | None = None,
        batches: int = 1,
    ) -> None:
        self.sizes, self._rule = sizes, rule
        self._given, self._batches = given or sizes, batches
        self.weights: list[Number] = []
        self.factor: Number = 1.0
        self._reference: Number = 1.0
        self._losses: list[Tensor] = []
        self._like: Tensor | None = None  # a loss with a graph
        self._key: str | None = None  # of the term by whose number microbatches are weighted
        # Of each microbatch: what that term averages over, and that by what each other term averages over.
        self._ratios: list[tuple[Number, dict[str, Number]]] = []
        self._terms: dict[int, list[Term]] = {}  # where the backwards that haven't begun will begin
        self._begun: dict[int, Number] = {}  # the weights with which the others have
        self._heard = -1  # the last microbatch with whose gradient a factor came
        self._is_unsuited = False  # has a backward begun with a weight that no factor puts right?

    # -- on the last stage -----------------------------------------------------------------------------------------

    def add(self, index: int, loss: Tensor) -> list[Term]:
        """The forward of a microbatch has run, after those of the microbatches before it.

        Args:
            loss: a scalar with its graph. It may have none where others have one: nothing counts in this microbatch.

        Returns:
            The terms of the loss, if they have been read.

        Raises:
            RuntimeError: no microbatch's loss has a graph.
        """
        if loss.requires_grad:
            self._like = loss.detach()
        elif index == len(self.sizes) - 1 and self._like is None:
            raise RuntimeError(
                "The loss that training_step returned has no gradient: it is a number, was detached, or depends on no "
                "trainable parameter."
            )
        self._losses.append(loss.detach().reshape(()))
        found = [] if self._rule is Rule.SAMPLES else all_terms_of(loss)
        self._terms[index] = found or ([Term(get_gradient_edge(loss))] if loss.requires_grad else [])
        terms = [term for term in found if not term.is_times_zero]
        main = main_of(terms, self._key)
        if self._rule is Rule.SUM and terms:  # by the same number in all microbatches
            self._ratios.append((1.0, {"": 1.0 if main is None else main.count}))
        elif main is not None:
            self._key = self._key or main.key
            self._ratios.append((main.count, ratios_of(main, terms)))
        self.weights.append(self._weight(index, terms))
        if index == 0:
            self._reference = self._guess()
        self._update_factor()
        return terms

    def _weight(self, index: int, terms: Sequence[Term]) -> Number:
        if self.is_sum:
            return 1.0
        weight = float(self._given[index])
        return weight if self._rule is Rule.SAMPLES else count_of(terms, self._losses[index], weight, self._key)

    def _guess(self) -> Number:
        """About what the gradients are to be divided by, from the first microbatch. Exact for a mean over samples."""
        own, total = (1, 1) if self.is_sum else (self.sizes[0], sum(self.sizes))
        weight = self.weights[0]
        weight = torch.where(weight == 0, own, weight) if isinstance(weight, Tensor) else weight or own
        dtype = torch.float32 if self._like is None else self._like.dtype
        if torch.finfo(dtype).bits < 32:  # they can't hold one part of 24, but one of a power of two
            return weight * 2.0 ** round(log2(total / own * self._batches))
        return weight / own * total * self._batches

    def _update_factor(self) -> None:
        total = self._batches * (1.0 if self.is_sum else sum(self.weights))
        if isinstance(total, Tensor):
            self.factor = torch.where(total == 0, 1.0, self._reference / total)
        else:
            self.factor = self._reference / total if total else 1.0

    def change(self, rule: Rule) -> None:
        """Another rule is found to hold, though backwards may have begun by the old one."""
        if rule is self._rule:
            return
        self._rule = rule
        self._ratios = []
        self.weights = [self._weight(index, ()) for index in range(len(self.weights))]
        # Backwards that have begun keep their weights, so the reference is what makes these the new ones.
        references: list[Number] = [self._reference / old * self.weights[k] for k, old in self._begun.items()]
        self._reference = next((each for each in references if float(each)), None) or self._guess()
        reference = float(self._reference)
        self._is_unsuited |= any(not isclose(float(each), reference, rel_tol=_EQUAL) for each in references)
        self._update_factor()

    def begin(self, index: int, scale: float) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward of a microbatch begins, and with what; nowhere if nothing counts in it. If nothing counts
        in the batch, the last microbatch's loss stands for it: an optimizer steps by gradients of zero, too.

        Args:
            scale: a factor of all gradients.
        """
        terms, weight, reference = self._terms.pop(index), self.weights[index], self._reference
        if index == len(self.sizes) - 1 and not any(map(may_count, self.weights)):
            seeds = [(term.edge, inverse(term.above) / self._batches * scale) for term in terms]
        elif terms and may_count(weight):
            self._begun[index] = weight
            ratios = [(term, ratio_of(weight, term.above)) for term in terms]
            seeds = [(t.edge, ratio / reference * scale) for t, ratio in ratios if may_count(ratio) or t.is_times_zero]
        else:
            seeds = []
        return [edge for edge, _ in seeds], [_seed(edge, seed) for edge, seed in seeds]

    # -- the batch -------------------------------------------------------------------------------------------------

    @property
    def is_sum(self) -> bool:
        """Is the batch's loss the sum of the microbatches'?"""
        return self._rule is Rule.SUM

    def loss(self) -> Tensor:
        """Of the whole batch, on the last stage."""
        assert self._like is not None, "a batch without a gradient is refused"
        losses = [loss.to(self._like) for loss in self._losses]
        return torch.stack(losses).sum() if self.is_sum else weighted_mean(losses, self.weights)

    def differs(self, fixed: Collection[str]) -> bool | Tensor:
        """Do terms of the loss average over numbers whose ratio isn't the same in all microbatches? Then there is no
        weight that suits all of them.

        Args:
            fixed: the keys of terms whose number isn't one of samples.
        """
        found: bool | Tensor = self._is_unsuited
        for key in {key for _, ratios in self._ratios for key in ratios} - {*fixed}:
            # A microbatch whose loss lacks a term has nothing that counts in it.
            found = found | _differ([ratios.get(key, _ratio_of_nothing(count)) for count, ratios in self._ratios])
        return found

    def drops(self) -> bool | Tensor:
        """Is a microbatch's loss infinite though nothing counts in it? Its sum isn't 0, as that of a focal loss, so it
        is a part of what one process divides by the number of the whole batch. If nothing counts in any of them, the
        loss of one process is infinite too."""
        found: bool | Tensor = False
        counts: bool | Tensor = False
        for weight, loss in zip(self.weights, self._losses, strict=True):
            if isinstance(weight, Tensor) or weight == 0:
                found = found | (loss.isinf() & (scalar(weight, torch.float64, loss.device) == 0))
            counts = counts | (weight != 0)
        found = found & counts
        return bool(found) if isinstance(found, Tensor) and found.device.type == "cpu" else found

    def equal(self, values: Sequence[object]) -> bool | Tensor:
        """Are these values, one for each microbatch, the losses? On a GPU the answer is a tensor: to read it
        would wait for the GPU."""
        numbers = [value for value in values if isinstance(value, float) or _is_scalar(value)]
        if not numbers or len(numbers) != len(values) or len(numbers) != len(self._losses):
            return False
        like = self._losses[0] if self._like is None else self._like
        one, other = ([scalar(each, like.dtype, like.device) for each in all_of] for all_of in (numbers, self._losses))
        found = torch.isclose(torch.stack(one), torch.stack(other), 1e-6, 0, equal_nan=True).all()
        return bool(found) if found.device.type == "cpu" else found

    # -- the factor ------------------------------------------------------------------------------------------------

    def take_factor(self, factor: Tensor, index: int) -> None:
        """The next chunk has sent its factor with the gradient of a microbatch. The newest counts: on a stage with two
        chunks it may have come before. The last stage knows it."""
        if index >= self._heard and not self._losses:
            self._heard, self.factor = index, number_of(factor)


def _ratio_of_nothing(count: Number) -> Number:
    """The ratio for a term that a microbatch's loss lacks; NaN if nothing counts in the microbatch at all."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, nan, 0.0)
    return 0.0 if count else nan


def _differ(ratios: Sequence[Number]) -> bool | Tensor:
    """Are they different numbers? NaN equals all."""
    device = next((ratio.device for ratio in ratios if isinstance(ratio, Tensor)), None)
    if device is None:
        numbers = [ratio for ratio in ratios if not isinstance(ratio, Tensor) and not isnan(ratio)]
        return max(numbers) - min(numbers) > _EQUAL * max(map(abs, numbers))
    values = torch.stack([scalar(ratio, torch.float64, device) for ratio in ratios])
    highest, lowest = values.nan_to_num(nan=-inf).max(), values.nan_to_num(nan=inf).min()
    return highest - lowest > _EQUAL * torch.maximum(highest.abs(), lowest.abs())


def _is_scalar(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _seed(edge: GradientEdge, weight: Number) -> Tensor:
    """A gradient for an edge of a graph, the same for each element."""
    shape, dtype, device = like_edge(edge)
    return scalar(weight, dtype, device).expand(shape)
