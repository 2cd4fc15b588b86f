"""costs/layer_costs.py: what a layer takes on numbers of samples that weren't tried."""

from __future__ import annotations

import pytest

from lightning_parallel.costs.layer_costs import Cost


def test_fewer_samples_than_were_tried_take_no_less_each() -> None:
    two, eight = Cost(forward=10.0, backward=20.0, first=10.0, inner=4.0), Cost(forward=47.0, backward=95.0, first=46.0)
    one = Cost.mixed([two, eight], [7 / 6, -1 / 6])
    assert one.forward < 5 and one.backward < 10 and one.first < 5
    bounded = one.at_least(0.5, two)
    assert (bounded.forward, bounded.backward, bounded.first) == (5.0, 10.0, 5.0)
    assert bounded.inner == pytest.approx(4.0 * 7 / 6)  # bytes are as they were
