"""Figures of contestants that were measured in turn, a few steps in each round: compared round by round, since the
machine's speed drifts from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TypeVar

from tools.bench.report import spread

T = TypeVar("T")


def in_turn(runs: Sequence[T], turn: int) -> Sequence[T]:
    """Forwards in even rounds and backwards in odd ones, so that a drift of the machine favours none."""
    return runs if turn % 2 == 0 else runs[::-1]


def by_round(seconds: Sequence[float], steps: int) -> list[float]:
    """Median of each round of so many steps."""
    return [median(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Of each round."""
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def middle(values: Sequence[float], digits: int = 3) -> str:
    """From the first quartile to the third: the extremes are of rounds that something else ran in."""
    quarter = len(values) // 4
    return spread(sorted(values)[quarter : len(values) - quarter], digits)
