"""By which rules a loss follows from those of two microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_parallel.losses.normaliser import Rule
from lightning_parallel.losses.trial import Outcome, find, joined, joins


@pytest.mark.parametrize(("counts", "losses", "sizes", "rules"), [
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
])  # fmt: skip
def test_a_mean_is_by_counts_that_add_up(
    counts: tuple[float, ...], losses: tuple[float, ...], sizes: tuple[int, ...], rules: set[Rule]
) -> None:
    *parts, whole = (Outcome(loss, count, {}, []) for loss, count in zip(losses, counts, strict=True))
    assert find(whole, parts, sizes, 1e-7).rules == rules


OF_HEADS = torch.randn(1, 2, 4, 4)  # a bias for each of two heads, for all samples


@pytest.mark.parametrize(("one", "other", "shape"), [
    (torch.zeros(2, 3), torch.ones(2, 3), (4, 3)),
    (torch.zeros(2, 3), torch.zeros(2, 3), (4, 3)),  # such as a mask that hides nothing
    (torch.zeros(6, 3), torch.ones(6, 3), (12, 3)),
    (torch.zeros(5, 2), torch.ones(5, 2), (5, 4)),
    (torch.zeros(1, 2), torch.ones(1, 2), (1, 4)),  # of a single position
    (OF_HEADS, OF_HEADS, OF_HEADS.shape),
    (torch.zeros(5), torch.zeros(5), (5,)),
    (torch.zeros(6, 3), torch.zeros(6, 3), (6, 3)),  # positions, three times as many as samples
])  # fmt: skip
def test_activations_of_two_samples_each_are_joined_where_samples_lie(
    one: Tensor, other: Tensor, shape: tuple[int, ...]
) -> None:
    both = joined(one, other, (2, 2))
    assert both is not None and both.shape == shape


def test_equal_activations_may_have_rows_for_samples() -> None:
    mask = torch.zeros(6, 3)  # of three heads, repeated for each sample
    both = joined(mask, mask, (2, 2), of_samples=True)
    assert both is not None and both.shape == (12, 3)
    assert joins(torch.zeros(12, 3), mask, mask, (2, 2))
