"""Staleness and corrections: the formulas against the schedule's lists, and against the claims made for them."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from lightning_parallel.pipeline.staleness import (
    correction_weight,
    discount,
    extrapolate,
    is_second_order,
    mean_staleness,
)
from lightning_parallel.schedules.actions import Backward, Forward, Step
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.checks import validate
from lightning_parallel.schedules.named import asynchronous

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 7), (0, 1, 2)))  # stages, microbatches, extra in flight


pytestmark = pytest.mark.usefixtures("in_double_precision")


def counted(actions: list[Forward | Backward | Step]) -> dict[int, int]:
    """The steps between each microbatch's forward and its backward."""
    steps = 0
    before: dict[int, int] = {}
    staleness: dict[int, int] = {}
    for action in actions:
        if isinstance(action, Step):
            steps += 1
        elif isinstance(action, Forward):
            before[action.microbatch] = steps
        else:
            staleness[action.microbatch] = steps - before[action.microbatch]
    return staleness


@pytest.mark.parametrize(("stages", "microbatches", "extra"), SIZES)
def test_mean_staleness_is_what_the_lists_have_once_full(stages: int, microbatches: int, extra: int) -> None:
    filled = -(-(stages - 1) * (1 + extra) // microbatches)  # updates that begin before the pipeline is full
    updates = filled + 3
    lists = asynchronous(stages, microbatches, updates, extra)
    validate(lists)
    for s, actions in enumerate(lists):
        staleness = counted(actions)
        assert len(staleness) == updates * microbatches
        warmup = AsyncOneFOneB(stages, s, extra).warmup
        for update in range(filled, updates):
            late = [staleness[k] for k in range(update * microbatches, (update + 1) * microbatches)]
            mean = Fraction(sum(late), microbatches)
            assert mean == Fraction(warmup, microbatches)
            for weights in ("stash", "latest"):
                assert mean_staleness(weights, warmup, microbatches) == float(mean)
            assert set(late) <= {warmup // microbatches, -(-warmup // microbatches)}
        assert mean_staleness("2bw", warmup, microbatches) == 1.0


def test_a_correction_weighs_the_mean_staleness_or_the_users_number() -> None:
    for correction in ("error_feedback", "second_order"):
        assert correction_weight(correction, "stash", 3, 4) == correction_weight(correction, "latest", 3, 4) == 0.75
        assert correction_weight(correction, "2bw", 0, 4) == 1.0
        assert correction_weight(correction, "stash", 0, 4) == 0.0
    assert correction_weight(None, "stash", 3, 4) == 0.0
    assert correction_weight(0.4, "stash", 3, 4) == correction_weight(0.4, "2bw", 0, 4) == 0.4
    assert correction_weight(0.4, "stash", 0, 4) == 0.0  # nothing is late


def test_the_last_correction_is_used_where_no_more_than_an_update_lies_between() -> None:
    used = {weight: is_second_order("second_order", weight) for weight in (0.0, 0.25, 1.0, 1.25)}
    assert used == {0.0: False, 0.25: True, 1.0: True, 1.25: False}
    for correction in ("error_feedback", 0.5, None):
        assert not is_second_order(correction, 0.5)


def test_extrapolation_is_the_formula() -> None:
    v, u, last = torch.randn(3, 5).unbind()
    read = v + u - last
    parameters = [v.clone(), v.clone()]
    c = 0.75
    for known, expected in ((None, v - c * u), ([read, read], v - c * (1 + c) * u + c * last)):
        values = [v + u, v + u]
        extrapolate(values, parameters, known, c)
        for found, parameter in zip(values, parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=4e-15)
            assert torch.equal(parameter, v)
        torch.testing.assert_close(read, v + u - last, rtol=0, atol=0)


def test_the_discount_of_late_stages_wears_off() -> None:
    assert discount(4.0, 0, 10) == 0.25
    assert discount(4.0, 5, 10) == pytest.approx(0.5)
    assert discount(7.0, 3, 10) == pytest.approx(7**-0.7)
    assert [discount(4.0, update, 10) for update in (10, 11, 1000)] == [1.0] * 3
    assert [discount(staleness, 0, 10) for staleness in (0.0, 0.5, 1.0)] == [1.0] * 3
