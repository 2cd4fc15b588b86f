"""Every layer on one stage, and no stage larger than it has to be."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from lightning_parallel.cuts.balance import Balance, balanced, bounds_of


@pytest.mark.parametrize(("balance", "allowed", "expected"), [
    ("layers", (True,) * 4, [0, 2, 4]), ("layers", (False, False, True, True), [0, 3, 4]),
    ([3, 1], (True,) * 4, [0, 3, 4]), ((1, 3), (True,) * 4, [0, 1, 4]),
])  # fmt: skip
def test_the_balance_is_the_users(balance: Balance, allowed: tuple[bool, ...], expected: list[int]) -> None:
    assert bounds_of([9, 1, 1, 1], 2, balance, allowed) == expected


def test_a_deep_model_is_cut_for_many_stages_in_no_time() -> None:
    costs = [10**6 + 977 * (i * i % 1009) for i in range(400)]
    start = time.thread_time()  # other programs' isn't in it
    bounds = balanced(costs, 32, [True] * 400)
    assert time.thread_time() - start < 2, "it takes 0.05 s; by loops it took 5 s"
    assert len(set(bounds)) == 33


def test_the_split_is_the_best_of_all() -> None:
    """Of those whose bounds fall where they are allowed: that with the smallest largest stage, then with the least sum
    of squares."""
    generator = random.Random(0)
    seen = 0
    for _ in range(300):
        count = generator.randint(1, 8)
        stages = generator.randint(1, count)
        costs = [generator.choice([0, 1, 2, 5, 100, generator.randint(1, 10**6)]) for _ in range(count)]
        allowed = [generator.random() < 0.8 for _ in range(count)]

        def worth(bounds: Sequence[int], costs: list[int] = costs) -> tuple[int, int]:
            sizes = [sum(costs[a:b]) for a, b in pairwise(bounds)]
            return max(sizes), sum(s * s for s in sizes)

        inner = [bound for bound in range(1, count) if allowed[bound - 1]]
        splits = [(0, *chosen, count) for chosen in combinations(inner, stages - 1)]
        if splits:
            seen += 1
            assert worth(bounds_of(costs, stages, "operations", allowed)) == min(map(worth, splits))
    assert seen > 200
