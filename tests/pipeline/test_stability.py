"""Staleness on a quadratic: how large rate x curvature may be, by the optimizer's momentum and by the correction.

The figures are those on the page about late gradients. The update of an optimizer with momentum b is m, with
m <- b m + (1 - b) g; that of a look-ahead like NAdam's is (1 - mu) g + mu m.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_parallel.pipeline.staleness import Correction, extrapolate, is_second_order

pytestmark = pytest.mark.usefixtures("in_double_precision")

M16, M8 = 7 / 16, 7 / 8  # of the first of 8 stages, in updates
CORRECTIONS: tuple[Correction, ...] = (None, "error_feedback", "second_order")
PRODUCTS = torch.logspace(-1, 2, 5_000)


def limit(momentum: float, staleness: float, correction: Correction, look_ahead: float = 1.0) -> float:
    """The least product of rate and curvature with which the parameters don't stay bounded.

    Args:
        momentum: b.
        staleness: c, the share of an update's microbatches that read the version before the newest.
        look_ahead: mu.
    """
    # The state is (v, r, r before, m), each a row of what it is of the four before the update, for all products.
    v, r, older, m = torch.eye(4).expand(len(PRODUCTS), 4, 4).unbind(1)
    gradient = PRODUCTS[:, None] * ((1 - staleness) * r + staleness * older)
    m = momentum * m + (1 - momentum) * gradient
    update = (1 - look_ahead) * gradient + look_ahead * m
    weight = staleness if correction is not None else 0.0
    last = v - r if is_second_order(correction, weight) else None
    after: list[Tensor] = [v - update, extrapolate(v - update, update, last, weight), r, m]
    largest = torch.linalg.eigvals(torch.stack(after, 1)).abs().amax(1)
    return PRODUCTS[largest > 1 + 1e-9][0].item()


@pytest.mark.parametrize(
    ("momentum", "staleness", "limits"),
    [
        (0.9, 0.0, [38.0, 38.0, 38.0]),
        (0.9, M16, [2.29, 6.75, 12.5]),
        (0.9, M8, [1.14, 3.15, 5.66]),
        (0.5, M8, [1.14, 1.19, 1.66]),
        (0.0, M8, [1.14, 0.75, 0.72]),  # the last update says nothing about the next
    ],
)
def test_what_a_correction_gives_grows_with_the_momentum(
    momentum: float, staleness: float, limits: list[float]
) -> None:
    found = [limit(momentum, staleness, correction) for correction in CORRECTIONS]
    assert found == pytest.approx(limits, rel=0.01)


@pytest.mark.parametrize(
    ("look_ahead", "limits"),
    [(0.45, [1.90, 1.29, 1.26]), (0.7, [2.90, 2.14, 2.17]), (0.9, [3.21, 4.13, 4.93])],
)
def test_a_look_ahead_with_little_momentum_is_hurt_by_a_correction(look_ahead: float, limits: list[float]) -> None:
    found = [limit(0.9, M8, correction, look_ahead) for correction in CORRECTIONS]
    assert found == pytest.approx(limits, rel=0.01)
