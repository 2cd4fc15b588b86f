"""By which rules a loss follows from those of two microbatches."""

from __future__ import annotations

import pytest

from lightning_parallel.losses.normaliser import Rule
from lightning_parallel.losses.trial import Outcome, find


@pytest.mark.parametrize(
    ("counts", "losses", "sizes", "rules"),
    [
        ((12, 4, 16), (1.0, 3.0, 1.5), (2, 2), {Rule.COUNTS}),
        ((6, 6, 12), (1.0, 3.0, 2.0), (2, 2), {Rule.COUNTS, Rule.SAMPLES}),
        ((6, 3, 9), (1.0, 4.0, 2.0), (2, 1), {Rule.COUNTS, Rule.SAMPLES}),
        ((3, 0, 3), (2.0, 0.0, 2.0), (2, 2), {Rule.COUNTS, Rule.SUM}),
        ((2, 0, 4), (2.0, 0.0, 2.0), (2, 2), {Rule.COUNTS, Rule.SUM}),  # of samples, as no number is read
        ((0, 0, 0), (0.0, 0.0, 0.0), (2, 2), {*Rule}),
        ((2, 2, 2), (1.0, 3.0, 2.0), (2, 2), {Rule.SAMPLES}),  # a factor, no count
        ((2, 2, 2), (1.0, 4.0, 2.0), (2, 1), {Rule.SAMPLES}),
        ((2, 2, 2), (1.0, 4.0, 2.5), (2, 1), set()),
        ((2, 2, 2), (1.0, 3.0, 4.0), (2, 2), {Rule.SUM}),
    ],
)
def test_a_mean_is_by_counts_that_add_up(
    counts: tuple[float, ...], losses: tuple[float, ...], sizes: tuple[int, ...], rules: set[Rule]
) -> None:
    *parts, whole = (Outcome(loss, count, {}, []) for loss, count in zip(losses, counts, strict=True))
    assert find(whole, parts, sizes, 1e-7).rules == rules
