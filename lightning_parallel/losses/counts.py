"""Finds by a loss's terms what the loss averages over, and in which ratios the numbers of several terms are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from lightning_parallel.losses.graph import Number, Term, anything_counts, number_of


def _averaging(terms: Sequence[Term]) -> list[Term]:
    """The terms that are divided; if there are none, those that are multiplied with a number, as with ``1 / n``. Those
    of weights alone average over no samples."""
    terms = [term for term in terms if not term.is_of_weights]
    divided = [term for term in terms if term.nodes]
    return divided or [term for term in terms if isinstance(term.count, Tensor) or abs(term.count) != 1]


def main_of(terms: Sequence[Term], key: str | None) -> Term | None:
    """The term by whose number microbatches are weighted: the first that averages, or the first of this key."""
    averages = _averaging(terms)
    return next((term for term in averages if term.key == key), averages[0] if averages else None)


def count_of(terms: Sequence[Term], loss: Tensor, otherwise: float, key: str | None = None) -> Number:
    """What a loss averages over; 0 if nothing counts. A denominator of 1 or less may stand for 0, as ``clamp(min=1)``
    gives it. Where what is summed doesn't show whether anything counts, a loss of 0 shows that nothing does.

    Args:
        key: of the term whose number counts.
    """
    main = main_of(terms, key)
    count: Number = otherwise if main is None else main.count
    if main is not None and not main.is_guarded:
        return count
    is_small = main is None or count**2 <= 1
    is_none = is_small if is_small is False else is_small & _nothing_counts(terms, main, loss)
    if isinstance(is_none, Tensor):
        return (~is_none).double() * count
    return 0.0 if is_none else count


def _nothing_counts(terms: Sequence[Term], main: Term | None, loss: Tensor) -> bool | Tensor:
    """Does nothing count in a loss? False if neither its graph nor its value shows it."""
    averages = _averaging(terms)
    alike = [term for term in averages if main is not None and term.key == main.key]
    known = [each for each in map(anything_counts, alike) if each is not None]
    if alike and len(known) == len(alike):
        some = reduce(or_, known)
        return ~some if isinstance(some, Tensor) else not some
    return number_of(loss) == 0 if len(alike) == len(averages) else False


def numbered(terms: Sequence[Term]) -> dict[str, Term]:
    """The terms by their keys, where those of the same key are numbered."""
    seen: Counter[str] = Counter()
    found: dict[str, Term] = {}
    for term in terms:
        seen[term.key] += 1
        found[f"{term.key}#{seen[term.key]}"] = term
    return found


def ratios_of(main: Term, terms: Sequence[Term]) -> dict[str, Number]:
    """The ratio of the main term's number to that of each other term. A term is left out if nothing counts in it and
    in the main one."""
    averaging = {key: term for key, term in numbered(terms).items() if term.nodes and not term.is_of_weights}
    others = {key: term.count for key, term in averaging.items() if term is not main}
    some = {key: count for key, count in others.items() if may_count(count) or may_count(main.count)}
    return {key: ratio_of(main.count, count) for key, count in some.items()}


def ratio_of(main: Number, other: Number) -> Number:
    """The ratio of two numbers: 1 if they are equal, 0 if nothing counts in the other."""
    if isinstance(main, Tensor) or isinstance(other, Tensor):
        main, other = torch.as_tensor(main, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
        return torch.where(main == other, 1.0, torch.where(other == 0, 0.0, main / other))
    return 1.0 if main == other else main / other if other else 0.0


def may_count(weight: Number) -> bool:
    """False only for a number on the host that is 0."""
    return isinstance(weight, Tensor) or weight != 0
