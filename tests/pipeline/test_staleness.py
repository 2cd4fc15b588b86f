"""Staleness and corrections: the formulas against the schedule's lists, and against the claims made for them."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lightning_parallel.pipeline.staleness import (
    Correction,
    copies,
    correction_weight,
    discount,
    extrapolate,
    is_second_order,
    mean_staleness,
)
from lightning_parallel.schedules.actions import Backward, Forward, Step
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from recipes.schedule.figures import asynchronous
from tests.pipeline.versions import version

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
    for s, actions in enumerate(asynchronous(stages, microbatches, updates, extra)):
        staleness = counted(actions)
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
        assert correction_weight(correction, "stash", 3, 4) == 0.75
        assert correction_weight(correction, "latest", 6, 4) == 1.5
        assert correction_weight(correction, "2bw", 3, 4) == 1.0
        assert correction_weight(correction, "2bw", 0, 4) == 1.0
        assert correction_weight(correction, "stash", 0, 4) == 0.0
    for weights in ("stash", "latest", "2bw"):
        assert correction_weight(None, weights, 3, 4) == 0.0
        assert correction_weight(0.4, weights, 3, 4) == 0.4
        assert correction_weight(2, weights, 3, 4) == 2.0
    assert correction_weight(0.4, "stash", 0, 4) == 0.0  # nothing is late
    assert correction_weight(0.4, "2bw", 0, 4) == 0.4


def test_the_last_correction_is_used_where_no_more_than_an_update_lies_between() -> None:
    used = {weight: is_second_order("second_order", weight) for weight in (0.0, 0.25, 1.0, 1.25)}
    assert used == {0.0: False, 0.25: True, 1.0: True, 1.25: False}
    for correction in ("error_feedback", 0.5, None):
        assert not is_second_order(correction, 0.5)


def test_extrapolation_is_the_formula_and_a_new_tensor() -> None:
    v, u, last = torch.randn(3, 5).unbind()
    before = [x.clone() for x in (v, u, last)]
    c = 0.75
    first, second = extrapolate(v, u, None, c), extrapolate(v, u, last, c)
    torch.testing.assert_close(first, v - c * u, rtol=0, atol=1e-15)
    torch.testing.assert_close(second, v - c * (1 + c) * u + c * last, rtol=0, atol=1e-15)
    assert len({x.data_ptr() for x in (v, u, last, first, second)}) == 5
    assert all(torch.equal(x, y) for x, y in zip((v, u, last), before, strict=True))
    by_hand = extrapolate(torch.tensor([10.0]), torch.tensor([4.0]), torch.tensor([2.0]), 0.5)
    assert by_hand.item() == 10 - 0.5 * 1.5 * 4 + 0.5 * 2
    assert extrapolate(v.bfloat16(), u.bfloat16(), None, c).dtype == torch.bfloat16


@pytest.mark.parametrize("c", [0.2, 0.4375, 0.75, 0.875, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_correction_dies_away_without_updates(dtype: torch.dtype, c: float) -> None:
    v = torch.randn(200).to(dtype)
    r = v + 0.1 * torch.randn(200).to(dtype)
    for _ in range(300):
        r = extrapolate(v, torch.zeros_like(v), v - r, c)
    assert torch.equal(r, v) if dtype.itemsize == 2 else torch.allclose(r, v, rtol=0, atol=1e-5)


class Path:
    """Parameters v_n after n updates u_n, and what forwards read of them."""

    def __init__(self, updates: list[Tensor], correction: Correction, weight: float) -> None:
        self.u = [torch.zeros_like(updates[0]), *updates]
        self.v = [torch.randn_like(updates[0])]
        self.r = [self.v[0]]
        for n in range(1, len(self.u)):
            self.v.append(self.v[-1] - self.u[n])
            last = self.v[n - 1] - self.r[n - 1] if is_second_order(correction, weight) else None
            self.r.append(extrapolate(self.v[n], self.u[n], last, weight))

    def mean_error(self, stages: int, stage: int, microbatches: int, update: int, extra: int = 0) -> Tensor:
        """What an update's microbatches read in the mean, less the parameters that it is applied to."""
        numbers = range(update * microbatches, (update + 1) * microbatches)
        read = [self.r[version(stages, stage, microbatches, k, extra)] for k in numbers]
        return torch.stack(read).mean(0) - self.v[update]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 3), (4, 4), (4, 8), (8, 8), (8, 16)])
def test_what_is_read_is_off_by_differences_of_updates(stages: int, microbatches: int) -> None:
    for s in range(stages):
        c = mean_staleness("stash", stages - 1 - s, microbatches)
        first = Path(list(torch.randn(6, 7)), "error_feedback", c)
        second = Path(list(torch.randn(6, 7)), "second_order", c)
        for n in (4, 5):
            u = first.u
            close(first.mean_error(stages, s, microbatches, n), c**2 * (u[n] - u[n - 1]))
            u, b = second.u, min(c, 0.9)
            now, before = (second.mean_error(stages, s, microbatches, k) for k in (n, n - 1))
            close(now + b * before, c * (c - b + b * c) * (u[n] - u[n - 1]))  # c^3 of it where b = c


def test_error_feedback_of_a_whole_update_is_the_papers_rule() -> None:
    c = correction_weight("error_feedback", "2bw", 3, 4)
    path = Path(list(torch.randn(6, 7)), "error_feedback", c)
    w = path.r[0]
    for n in range(1, 7):
        w = w - path.u[n] - c * (path.u[n] - path.u[n - 1])
        close(path.r[n], w)


@pytest.mark.parametrize("correction", ["error_feedback", "second_order"])
@pytest.mark.parametrize(("stages", "microbatches", "extra"), SIZES)
def test_steady_drift_is_read_without_error(stages: int, microbatches: int, extra: int, correction: Correction) -> None:
    filled = -(-(stages - 1) * (1 + extra) // microbatches)
    drift = torch.randn(7)
    for s in range(stages):
        c = correction_weight(correction, "stash", AsyncOneFOneB(stages, s, extra).warmup, microbatches)
        path = Path([drift] * (filled + 305), correction, c)
        # The first versions have no updates before them to be extrapolated from; 0.9^300 = 2e-14.
        error = path.mean_error(stages, s, microbatches, filled + 304, extra)
        torch.testing.assert_close(error, torch.zeros(7), rtol=0, atol=1e-12)


def test_copies_are_those_in_flight_and_those_of_the_correction() -> None:
    for correction, more in ((None, 0), ("error_feedback", 1), (0.5, 1), ("second_order", 1)):
        assert copies("stash", correction, 3, 4) == 1 + more
        assert copies("2bw", correction, 3, 4) == 1 + more
        assert copies("latest", correction, 3, 4) == more
        assert copies("stash", correction, 0, 4) == 0  # the last stage
    assert copies("stash", None, 3, 1) == 3
    assert copies("stash", "second_order", 3, 1) == 4  # of first order


def test_the_discount_of_late_stages_wears_off() -> None:
    assert discount(4.0, 0, None) == discount(4.0, 99, None) == 1.0
    assert discount(4.0, 0, 10) == 0.25
    assert discount(4.0, 5, 10) == pytest.approx(0.5)
    assert discount(7.0, 3, 10) == pytest.approx(7**-0.7)
    assert [discount(4.0, update, 10) for update in (10, 11, 1000)] == [1.0] * 3
    assert [discount(staleness, 0, 10) for staleness in (0.0, 0.5, 1.0)] == [1.0] * 3
