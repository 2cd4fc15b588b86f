"""Staleness on a quadratic, by the optimizer's momentum and by the correction.

How large rate x curvature may be, and how far noise takes what forwards read from the parameters.

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


def after_an_update(
    products: Tensor, momentum: float, staleness: float, correction: Correction, look_ahead: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How (v, r, r before, m) depend on themselves, [products, 4, 4], and on the noise of the gradient, [products, 4].

    Args:
        products: of rate and curvature.
        momentum: b.
        staleness: c, the share of an update's microbatches that read the version before the newest.
        look_ahead: mu.
    """
    v, r, older, m, noise = torch.eye(5).expand(len(products), 5, 5).unbind(1)
    gradient = products[:, None] * ((1 - staleness) * r + staleness * older) + noise
    m = momentum * m + (1 - momentum) * gradient
    update = (1 - look_ahead) * gradient + look_ahead * m
    weight = staleness if correction is not None else 0.0
    last = v - r if is_second_order(correction, weight) else None
    both = torch.stack([v - update, extrapolate(v - update, update, last, weight), r, m], 1)
    return both[..., :4], both[..., 4]


def limit(momentum: float, staleness: float, correction: Correction, look_ahead: float = 1.0) -> float:
    """The least product of rate and curvature with which the parameters don't stay bounded."""
    products = torch.logspace(-1, 2, 5_000)
    matrices, _ = after_an_update(products, momentum, staleness, correction, look_ahead)
    largest = torch.linalg.eigvals(matrices).abs().amax(1)
    return products[largest > 1 + 1e-9][0].item()


def error(momentum: float, staleness: float, correction: Correction, look_ahead: float = 1.0) -> float:
    """The variance, from noise of variance 1, of what an update's forwards read in the mean less the parameters."""
    matrices, noises = after_an_update(torch.tensor([0.1]), momentum, staleness, correction, look_ahead)
    off = torch.tensor([-1, 1 - staleness, staleness, 0.0])
    total, moved = 0.0, noises[0]
    for _ in range(5_000):
        total += (off @ moved).item() ** 2
        moved = matrices[0] @ moved
    return total


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


@pytest.mark.parametrize(
    ("look_ahead", "staleness", "errors"),
    [
        (1.0, M8, [0.044, 0.0065, 0.020]),
        (0.9, M8, [0.055, 0.029, 0.139]),  # a look-ahead's update is mostly news, and is taken for the next one
        (1.0, M16, [0.0105, 0.0004, 0.0001]),
        (0.9, M16, [0.0133, 0.0018, 0.0006]),
    ],
)
def test_noise_makes_forwards_read_other_weights(look_ahead: float, staleness: float, errors: list[float]) -> None:
    found = [error(0.9, staleness, correction, look_ahead) for correction in CORRECTIONS]
    assert found == pytest.approx(errors, rel=0.02, abs=5e-5)
