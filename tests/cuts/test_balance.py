"""Every layer on one stage, and no stage larger than it has to be."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from lightning_parallel.cuts.balance import Balance, balanced, bounds_of


def counts(costs: Sequence[int], stages: int, balance: Balance = "parameters") -> list[int]:
    """Layers of each stage."""
    bounds = bounds_of(costs, stages, balance, [True] * len(costs))
    assert len(bounds) == stages + 1 and bounds[0] == 0 and bounds[-1] == len(costs)
    return [b - a for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ((1, 1, 1, 9), 2, [3, 1]),
        ((9, 1, 1, 1), 2, [1, 3]),
        ((4, 3, 2, 4, 3), 3, [1, 2, 2]),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), 3, [5, 2, 2]),
        ((10, 10, 1, 1, 1, 1), 3, [1, 1, 4]),
        ((1, 5, 2, 3), 3, [1, 1, 2]),  # not (1, 5), (2), (3), whose sum of squares is smaller
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(costs: Sequence[int], stages: int, expected: list[int]) -> None:
    assert counts(costs, stages) == expected


@pytest.mark.parametrize("balance", ["layers", [3, 1], (1, 3)])
def test_the_balance_is_the_users(balance: Balance) -> None:
    assert counts([9, 1, 1, 1], 2, balance) == ([2, 2] if balance == "layers" else list(balance))


@pytest.mark.parametrize("balance", [[1, 1], [4, 0], [1, 1, 2]])
def test_another_balance_is_refused(balance: Balance) -> None:
    with pytest.raises(ValueError, match="balance="):
        bounds_of([1] * 4, 2, balance, [True] * 4)


def test_a_deep_model_is_cut_for_many_stages_in_no_time() -> None:
    costs = [10**6 + 977 * (i * i % 1009) for i in range(400)]
    start = time.thread_time()  # other programs' isn't in it
    bounds = balanced(costs, 32, [True] * 400)
    assert time.thread_time() - start < 2, "it takes 0.05 s; by loops it took 5 s"
    assert len(set(bounds)) == 33


def test_the_split_is_the_best_of_all() -> None:
    generator = random.Random(0)
    for _ in range(200):
        count = generator.randint(1, 8)
        stages = generator.randint(1, count)
        costs = [generator.choice([0, 1, 2, 5, 100, generator.randint(1, 10**6)]) for _ in range(count)]

        def worth(bounds: Sequence[int], costs: list[int] = costs) -> tuple[int, int]:
            sizes = [sum(costs[a:b]) for a, b in pairwise(bounds)]
            return max(sizes), sum(s * s for s in sizes)

        splits = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
        assert worth(balanced(costs, stages, [True] * count)) == min(map(worth, splits))


@pytest.mark.parametrize(
    ("costs", "allowed", "expected"),
    [
        ((1, 1, 1, 1), (True, True, True, True), [2, 2]),
        ((1, 1, 1, 1), (True, False, True, True), [1, 3]),
        ((1, 1, 1, 1), (False, False, True, True), [3, 1]),
    ],
)
@pytest.mark.parametrize("balance", ["parameters", "operations", "layers"])
def test_bounds_fall_where_they_are_allowed(
    costs: Sequence[int], allowed: Sequence[bool], expected: list[int], balance: str
) -> None:
    bounds = bounds_of(costs, 2, balance, allowed)
    found = [b - a for a, b in pairwise(bounds)]
    assert sorted(found) == sorted(expected) and allowed[bounds[1] - 1]


def test_counts_that_put_a_bound_where_none_may_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"balance=\[2, 2\]: .*collects statistics"):
        bounds_of((1, 1, 1, 1), 2, [2, 2], (True, False, True, True))
