"""Normalises a batch's loss and gradients when microbatches average over different numbers.

A language model's loss is a mean over the labels that count, and their number n_k isn't the same in all microbatches.
Only when the last one has run its forward, the batch's number N is known; by then most backwards have run. So each
backward begins with a share of a reference, and the sum of the gradients gets one factor in the end::

    microbatch     labels n_k      its backward begins, at the sum of the losses, with
    0              12              1 / reference          reference = 12 * 3, a guess from the first one
    1               0              1 / reference          nothing counts: it adds nothing
    2               4              1 / reference
                   N = 16          then all gradients times reference / N = 36 / 16

``loss_graph.py`` reads n_k off each microbatch's own graph. The last stage sends the factor along with the gradients,
so every stage has it before its last backward of the batch. Where losses are means over samples it is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from math import inf, isclose, isnan, log2, nan
from operator import or_

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.batch import weighted_mean
from lightning_parallel.gradients.swapping import multiplied
from lightning_parallel.pipeline.loss_graph import Number, Term, anything_counts, number_of, terms_of
from lightning_parallel.torch_private import like_edge

_EQUAL = 1e-6  # relative; sums of class weights are rounded


class Rule(Enum):
    """How the losses of microbatches become that of a batch."""

    COUNTS = "a mean by what each of them averages over"
    SAMPLES = "a mean by samples"
    SUM = "a sum"


@dataclass(frozen=True)
class _Added:
    """The loss of a microbatch, before its backward.

    Attributes:
        edge: of the loss; None if it has no graph, since nothing counts in it.
        terms: of the loss, the one first by which it is weighted; empty if it is weighted as a whole.
    """

    edge: GradientEdge | None
    terms: list[Term]


class BatchLoss:
    """The loss of one batch. Every rank has one; losses are added on the last stage.

    Args:
        sizes: of the microbatches.
        rule: for the losses.
        given: what each loss averages over, if the user has said so.
        batches: that an update's gradients are the mean of.

    Attributes:
        sizes: of the microbatches.
        weights: of the losses of the microbatches that have run, by their index.
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
        self._given, self._batches = given, batches
        self._main: str | None = None  # the key of the term by whose number microbatches are weighted
        self._added: dict[int, _Added] = {}
        self._losses: dict[int, Tensor] = {}
        # Of each microbatch: what the main term averages over, and that by what each other term averages over.
        self._others: list[tuple[Number, dict[str, Number]]] = []
        self._begun: dict[int, Number] = {}  # the weights with which backwards have begun
        self._like: Tensor | None = None  # a loss with a graph
        self._is_unsuited = False  # has a backward begun with a weight that no factor puts right?
        self.weights: dict[int, Number] = {}
        self._reference: Number = 1.0
        self.factor: Number = 1.0

    # -- on the last stage -----------------------------------------------------------------------------------------

    def add(self, place: int, loss: Tensor) -> list[Term]:
        """The forward of a microbatch has run.

        Args:
            place: the microbatch's index in the batch.
            loss: a scalar with its graph. It may have none where others have one: nothing counts in this microbatch.

        Returns:
            The terms of the loss, as far as they are read.

        Raises:
            RuntimeError: no microbatch's loss has a graph.
        """
        if loss.requires_grad:
            self._like = loss.detach()
        elif place == len(self.sizes) - 1 and self._like is None:
            raise RuntimeError(
                "The loss that training_step returned has no gradient: it is a number, was detached, or depends on no "
                "trainable parameter."
            )
        self._losses[place] = loss.detach().reshape(())
        terms = found = terms_of(loss) if self._rule in (Rule.COUNTS, Rule.SUM) else []
        main = main_term(terms, self._main)
        if self._rule is Rule.SUM:  # by the same number in all microbatches
            self._others += [(1.0, {"": 1.0 if main is None else main.count})] if terms else []
            main = None
        elif main is not None:
            self._main = self._main or main.key
            terms = [main, *(term for term in terms if term is not main)]
            self._others.append((main.count, _ratios(terms)))
        edge = get_gradient_edge(loss) if loss.requires_grad else None
        self._added[place] = _Added(edge, [] if main is None else terms)
        self.weights[place] = self._weight(place, terms)
        if len(self.weights) == 1:
            self._reference = self._guess(place)
        self._update_factor()
        return found

    def _weight(self, place: int, terms: Sequence[Term]) -> Number:
        if self._given is not None:
            return self._given[place]
        if self._rule is Rule.SUM:
            return 1.0
        if self._rule is Rule.COUNTS:
            return count_of(terms, self._losses[place], float(self.sizes[place]))
        return float(self.sizes[place])

    def change(self, rule: Rule) -> None:
        """Another rule is found to hold, though backwards may have begun by the old one."""
        if rule is self._rule:
            return
        self._rule = rule
        self._others = []
        self.weights = {place: self._weight(place, ()) for place in self.weights}
        # Backwards that have begun keep their weights, so the reference is what makes these the new ones.
        references: list[Number] = [self._reference / old * self.weights[k] for k, old in self._begun.items()]
        counting = [each for each in references if float(each)]
        self._reference = counting[0] if counting else self._guess(next(iter(self.weights)))
        reference = float(self._reference)
        self._is_unsuited |= any(not isclose(float(each), reference, rel_tol=_EQUAL) for each in references)
        self._added = {place: _Added(added.edge, []) for place, added in self._added.items()}
        self._update_factor()

    def _guess(self, place: int) -> Number:
        """About what the gradients are to be divided by. Exact for a mean over samples."""
        total, own, weight = sum(self.sizes), self.sizes[place], self.weights[place]
        weight = torch.where(weight == 0, own, weight) if isinstance(weight, Tensor) else weight or own
        times = self._batches if self._rule is Rule.SUM else total / own * self._batches
        dtype = torch.float32 if self._like is None else self._like.dtype
        if torch.finfo(dtype).bits < 32:  # they can't hold one part of 24, but one of a power of two
            return weight * 2.0 ** round(log2(times))
        return weight * times if self._rule is Rule.SUM else weight / own * total * self._batches

    def _update_factor(self) -> None:
        total = self._batches * (1.0 if self._rule is Rule.SUM else sum(self.weights.values()))
        if isinstance(total, Tensor):
            self.factor = torch.where(total == 0, 1.0, self._reference / total)
        else:
            self.factor = self._reference / total if total else 1.0

    def begin(self, place: int, scale: float) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward of a microbatch begins, and with what; nowhere if nothing counts in it.

        Args:
            place: the microbatch's index in the batch.
            scale: a factor of all gradients.
        """
        added, weight = self._added.pop(place), self.weights[place]
        if not _may_count(weight) or added.edge is None:
            return [], []
        self._begun[place] = weight
        if not added.terms:
            return [added.edge], [_seed(added.edge, weight / self._reference * scale)]
        main = added.terms[0]
        first = main.below / self._reference * scale
        edges, seeds = [], []
        for term in added.terms:
            seed = first * _ratio(main.above, term.above)
            if _may_count(seed):
                edges.append(term.edge)
                seeds.append(_seed(term.edge, seed))
        return edges, seeds

    # -- the batch -------------------------------------------------------------------------------------------------

    @property
    def is_sum(self) -> bool:
        """Is the batch's loss the sum of the microbatches'?"""
        return self._rule is Rule.SUM

    def in_order(self) -> list[Number]:
        """The weights of the microbatches."""
        return [self.weights[place] for place in range(len(self.weights))]

    def loss(self) -> Tensor:
        """Of the whole batch, on the last stage."""
        assert self._like is not None, "a batch without a gradient is refused"
        losses = [self._losses[place].to(self._like) for place in range(len(self.sizes))]
        return torch.stack(losses).sum() if self.is_sum else weighted_mean(losses, self.in_order())

    def differs(self, fixed: Collection[str]) -> bool | Tensor:
        """Do terms of the loss average over numbers whose ratio isn't the same in all microbatches? Then there is no
        weight that suits all of them.

        Args:
            fixed: the keys of terms whose number isn't one of samples.
        """
        found: bool | Tensor = self._is_unsuited
        for key in {key for _, others in self._others for key in others} - {*fixed}:
            # A microbatch whose loss lacks a term has nothing that counts in it.
            lacking = [_ratio_of_nothing(count) for count, others in self._others if key not in others]
            ratios = lacking + [others[key] for _, others in self._others if key in others]
            if any(isinstance(ratio, Tensor) for ratio in ratios):
                values = torch.stack([torch.as_tensor(ratio) for ratio in ratios])
                highest, lowest = values.nan_to_num(nan=-inf).max(), values.nan_to_num(nan=inf).min()
                found = found | (highest - lowest > _EQUAL * torch.maximum(highest.abs(), lowest.abs()))
            else:
                numbers = [ratio for ratio in ratios if not isinstance(ratio, Tensor) and not isnan(ratio)]
                found = found | (max(numbers) - min(numbers) > _EQUAL * max(map(abs, numbers)))
        return found

    def are(self, values: Sequence[object]) -> bool:
        """Are these values, one for each microbatch, the losses? On a GPU that isn't looked at."""
        if any(loss.device.type != "cpu" for loss in self._losses.values()):
            return False
        if len(values) != len(self._losses) or not all(isinstance(value, Tensor | float) for value in values):
            return False
        pairs = zip(values, (self._losses[place] for place in range(len(values))), strict=True)
        return all(
            bool(torch.isclose(torch.as_tensor(value).to(loss), loss, 1e-6, 0, equal_nan=True).all())
            for value, loss in pairs
        )

    def receive(self, factor: Tensor) -> None:
        """The next chunk has sent its factor."""
        self.factor = number_of(factor)

    def message(self, device: torch.device) -> Tensor:
        """The factor as it is sent."""
        if isinstance(self.factor, Tensor):
            return self.factor.to(device, torch.float64)
        return torch.tensor(self.factor, dtype=torch.float64, device=device)

    def normalised(self, gradient: Tensor) -> Tensor:
        """A sum of gradients, with the factor, in place."""
        return multiplied(gradient, self.factor)


def _averaging(terms: Sequence[Term]) -> list[Term]:
    """The terms that are divided; if there are none, those that are multiplied with a number, as with ``1 / n``."""
    divided = [term for term in terms if term.averages]
    return divided or [term for term in terms if isinstance(term.count, Tensor) or abs(term.count) != 1]


def main_term(terms: Sequence[Term], key: str | None) -> Term | None:
    """The term by whose number microbatches are weighted: the first that averages, or the one of this key."""
    averages = _averaging(terms)
    return next((term for term in averages if term.key == key), averages[0] if averages else None)


def numbered(terms: Sequence[Term]) -> dict[str, Term]:
    """The terms by their keys, those of one key with a number."""
    seen: Counter[str] = Counter()
    found: dict[str, Term] = {}
    for term in terms:
        seen[term.key] += 1
        found[f"{term.key}#{seen[term.key]}"] = term
    return found


def _ratios(terms: Sequence[Term]) -> dict[str, Number]:
    """What other terms average over, by the number of the first one; what counts in neither is left out."""
    main, *_ = terms
    others = {key: term.count for key, term in numbered(terms).items() if term.averages and term is not main}
    some = {key: count for key, count in others.items() if _may_count(count) or _may_count(main.count)}
    return {key: _ratio(main.count, count) for key, count in some.items()}


def _ratio_of_nothing(count: Number) -> Number:
    """The ratio for a term that a microbatch's loss lacks; NaN if nothing counts in the microbatch at all."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, nan, 0.0)
    return 0.0 if count else nan


def count_of(terms: Sequence[Term], loss: Tensor, otherwise: Number) -> Number:
    """What a loss averages over.

    Args:
        terms: of the loss, the one first that counts.
        loss: its value. Where that is 0, and what is summed doesn't tell whether anything counts, a denominator of 1 or
            less stands for none, as ``clamp(min=1)`` gives it.
        otherwise: for a loss that doesn't average.
    """
    averages = _averaging(terms)
    count = averages[0].count if averages else otherwise
    if averages and averages[0].averages and not averages[0].guarded:
        return count
    alike = [term for term in averages if term.key == averages[0].key]
    some = [anything_counts(term) for term in alike]
    if averages and all(each is not None for each in some):
        counts = reduce(or_, (each for each in some if each is not None))
        if isinstance(counts, Tensor) or isinstance(count, Tensor):
            counts, count = torch.as_tensor(counts), torch.as_tensor(count)
            return torch.where(~counts & (count.abs() <= 1), 0.0, count)
        return 0.0 if not counts and abs(count) <= 1 else count
    if len(alike) == len(averages):
        if isinstance(count, Tensor):
            return torch.where((loss.detach() == 0) & ((count.abs() <= 1) | (not averages)), 0.0, count)
        if loss.device.type == "cpu" and float(loss.detach()) == 0 and (abs(count) <= 1 or not averages):
            return 0.0
    return count


def _may_count(weight: Number) -> bool:
    return isinstance(weight, Tensor) or weight != 0


def _ratio(main: Number, other: Number) -> Number:
    """Of two numbers; 1 if they are equal, 0 if nothing counts in the other."""
    if isinstance(main, Tensor) or isinstance(other, Tensor):
        main, other = torch.as_tensor(main), torch.as_tensor(other)
        return torch.where(main == other, 1.0, torch.where(other == 0, 0.0, main / other))
    return 1.0 if main == other else main / other if other else 0.0


def _seed(edge: GradientEdge, weight: Number) -> Tensor:
    """A gradient for an edge of a graph, the same for each element."""
    shape, dtype, device = like_edge(edge)
    return torch.as_tensor(weight, dtype=dtype, device=device).expand(shape)
