"""Rows of a table in which every pair of two columns' values appears, though not every combination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Pairs = set[tuple[tuple[int, Any], tuple[int, Any]]]


def pairs_of(row: Sequence[Any]) -> Pairs:
    return set(combinations(enumerate(row), 2))


def covering(
    columns: Sequence[Sequence[Any]], allowed: Callable[..., bool], first: Sequence[tuple[Any, ...]] = ()
) -> list[tuple[Any, ...]]:
    """Some of the product's rows that are ``allowed``, with all pairs of values that any such row has.

    Greedy: each row is the one with the most pairs that no row before has. Not the fewest rows, but always the same.

    Args:
        first: rows that are chosen in any case.
    """
    rows = [row for row in product(*columns) if allowed(*row)]
    chosen = list(first)
    missing: Pairs = set().union(*map(pairs_of, rows)).difference(*map(pairs_of, first))
    while missing:
        row = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        chosen.append(row)
    return chosen
