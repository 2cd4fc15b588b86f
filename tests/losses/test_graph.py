"""What a loss averages over, and where its backward may begin, are read off its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.losses.graph import terms_of
from lightning_parallel.losses.normaliser import BatchLoss, Rule

MASK = torch.tensor([True, True, False, True, False, False])
LABELS = torch.tensor([0, 1, -100, 2, -100, -100])
TEMPERATURE = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
FACTORS = nn.Parameter(torch.tensor([4.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize(("loss", "counts"), [
    (lambda z: z.mean(), [18.0]),
    (lambda z: z[MASK].mean(0).mean(), [9.0]),
    (lambda z: F.cross_entropy(z, LABELS), [3.0]),
    (lambda z: F.cross_entropy(z, LABELS) / TEMPERATURE, [6.0]),
    (lambda z: z.mean() / FACTORS[1], [36.0]),
    (lambda z: z[MASK].mean() * FACTORS.pow(-1)[1], [18.0]),
    (lambda z: z.mean() / next(iter(FACTORS)) + FACTORS[0], [72.0, 1.0]),
    (lambda z: z[0, 0] * z.mean(), [1.0]),  # a sample's number is no factor
    (lambda z: (z.sum(1) * MASK).sum() / MASK.sum(), [3.0]),
    (lambda z: 1 - (z.sum(1) * MASK).sum() / int(MASK.sum()), [-3.0]),
    (lambda z: 0.5 * z.mean() + z[MASK].mean(), [36.0, 9.0]),
    (lambda z: torch.stack([row.mean() for row in z]).mean(), [18.0] * 6),
    (lambda z: z.mean() + 0 * z.sum(), [18.0]),
    (lambda z: z.sum(), [1.0]),
    (lambda z: z.mean().sqrt(), [1.0]),  # no more is known
    (lambda z: z.mean() * z.mean(), [1.0]),
])  # fmt: skip
def test_what_terms_average_over(loss: Callable[[Tensor], Tensor], counts: list[float]) -> None:
    z = torch.rand(6, 3, dtype=torch.float64, requires_grad=True)
    found = terms_of(loss(z))
    assert [term.count for term in found] == pytest.approx(counts)


@pytest.mark.parametrize(("term", "is_of_weights"), [
    (lambda z, w: 0.5 * w[0, 0], True),
    (lambda z, w: 1e-3 * w.square().sum(), True),
    (lambda z, w: (w * w / 2).abs().mean(), True),
    (lambda z, w: torch.linalg.vector_norm(w) ** 2, True),
    (lambda z, w: (w @ w.T).square().mean(), True),
    (lambda z, w: z.mean(), False),
    (lambda z, w: (z * w).mean(), False),
    (lambda z, w: (z.detach() * w).mean(), False),
    (lambda z, w: (z.detach() @ w).mean(), False),
    (lambda z, w: F.cross_entropy(w[:2], torch.tensor([0, 1])), False),
])  # fmt: skip
def test_terms_of_weights_alone(term: Callable[[Tensor, Tensor], Tensor], is_of_weights: bool) -> None:
    z = torch.rand(3, 3, requires_grad=True)
    (found,) = terms_of(term(z, nn.Parameter(torch.rand(3, 3))))
    assert found.is_of_weights == is_of_weights


def test_nothing_is_read_from_a_device() -> None:
    """Meta tensors have no values: to read one is an error."""
    z = torch.empty(6, 3, device="meta", requires_grad=True)
    mask = torch.empty(6, dtype=torch.bool, device="meta")
    batch = BatchLoss([6, 6], Rule.COUNTS)
    for place in range(2):
        batch.add(place, (z.sum(1) * mask).sum() / mask.sum() + F.cross_entropy(z, LABELS.to("meta")))
    edges, seeds = batch.begin(0, 1.0)
    assert len(edges) == len(seeds) == 2 and isinstance(batch.factor, Tensor)
    # What nothing counts in weighs nothing, as on a CPU, though the host doesn't know the loss.
    batch = BatchLoss([6, 6], Rule.COUNTS)
    for place, loss in enumerate((z.sum() * 0, z.sum() / 1)):
        batch.add(place, loss)
    assert all(isinstance(weight, Tensor) for weight in batch.weights)


@pytest.mark.parametrize("count", [3, 24, 100])
def test_the_shares_of_losses_in_16_bits_add_up(count: int) -> None:
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    batch, total = BatchLoss([1] * count), 0.0
    for place in range(count):
        batch.add(place, weight.sum())
        (seed,) = batch.begin(place, 1.0)[1]
        total += float(seed)
    assert isinstance(batch.factor, float) and total * batch.factor == pytest.approx(1, rel=1e-12)
