"""What the ranks of a run report has to be, together, what one process does."""

from __future__ import annotations

import pytest

from tests.strategies.harness import Report, joined, largest_difference

EXACT = 1e-12  # float64


def assert_equal(reports: list[Report], reference: Report, exact: float = EXACT, *, replicas: int = 1) -> None:
    """Losses, every gradient of every update and all weights; and where there are no replicas, what each rank logs.

    Args:
        replicas: into how many each batch has been dealt. Each has the losses of its share, on all its ranks.
    """
    means = [sum(losses) / len(reports) for losses in zip(*(report.losses for report in reports), strict=True)]
    assert means == pytest.approx(reference.losses, rel=0, abs=exact)
    for report in reports:
        assert len(report.gradients) == len(reference.gradients)
        if replicas == 1:
            assert report.losses == pytest.approx(reference.losses, rel=0, abs=exact)
            assert report.metrics.keys() == reference.metrics.keys()
            assert report.metrics == pytest.approx(reference.metrics, rel=0, abs=exact)
            expected = [pytest.approx(metrics, rel=0, abs=exact) for metrics in reference.validation]
            assert report.validation == expected
    for update, gradients in enumerate(reference.gradients):
        found = joined(reports, "gradients", update)  # asserts that copies are equal to the bit
        assert largest_difference(found, gradients) < exact, f"update {update}"
    assert largest_difference(joined(reports, "weights"), reference.weights) < exact
