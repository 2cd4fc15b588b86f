"""What a flow says of its cuts."""

from __future__ import annotations

from lightning_parallel.plan.flow import Cargo, Flow, tensors_of


def test_each_stage_has_what_comes_in_and_what_goes_out() -> None:
    one, pair = Cargo("a", 0, 1), Cargo("b", 0, 2)
    flow = Flow(((one,), (one, pair)), (None, None, None))
    assert [flow.into(stage) for stage in range(3)] == [(), (one,), (one, pair)]
    assert [flow.out_of(stage) for stage in range(3)] == [(one,), (one, pair), ()]
    assert flow.heaviest((0, 1, 2)) == 1 and tensors_of(flow.out_of(1)) == 3
