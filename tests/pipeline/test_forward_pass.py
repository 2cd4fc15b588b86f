"""A stage's bookkeeping of one pass: what is waited for, what is handed on, in which order units may be called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.pipeline.forward_pass import Cuts, ForwardPass
from lightning_parallel.plan.flow import Cargo, Flow
from lightning_parallel.plan.partition import Partition
from lightning_parallel.plan.search import partition


def chain(layers: int) -> Partition:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    return partition(net, lambda: net(torch.ones(1)), layers, balance="layers")


PARTS = chain(3)
FIRST, SECOND = Cargo("0", 0, 1), Cargo("1", 0, 1)
SKIP = Cargo("0", 0, 2)  # two tensors of the first layer, over both cuts
LAST = tuple((str(layer), 0) for layer in range(3))
FLOW = Flow(((SKIP,), (SKIP, SECOND)), LAST)
CHAIN = Flow(((FIRST,), (SECOND,)), LAST)


def arrival(*values: float) -> Arrival:
    return Arrival([torch.full((1,), value) for value in values], (((1,), torch.float32, True),) * len(values))


def begun(
    parts: Partition,
    flow: Flow,
    stage: int,
    arrived: Arrival | None,
) -> ForwardPass:
    return ForwardPass(Cuts(flow, parts, stage), arrived)


def values(tensors: list[Tensor] | None) -> list[float] | None:
    return None if tensors is None else [tensor.item() for tensor in tensors]


def test_what_arrived_is_shared_out_among_its_calls() -> None:
    forward = begun(PARTS, FLOW, 2, arrival(1.0, 2.0, 3.0))
    assert forward.arrived.get(("1", 1)) is None and forward.arrived.get(("2", 0)) is None
    assert values(forward.arrived.get(("1", 0))) == [3.0]  # the layer before the cut
    assert values(forward.arrived.get(("0", 0))) == [1.0, 2.0]


def test_nothing_arrives_on_the_first_stage() -> None:
    assert begun(PARTS, FLOW, 0, None).arrived == {}


def test_what_passes_through_is_handed_on_as_it_came() -> None:
    skip = (FIRST,)
    forward = begun(
        chain(4),
        Flow((skip, skip, skip), (*LAST, ("3", 0))),
        2,
        arrival(1.0),
    )
    (mine,) = forward.arrived.get(("0", 0)) or []
    with torch.no_grad():
        mine += 10.0
    assert values(forward.departure()) == [1.0]


def test_what_a_later_stage_needs_is_handed_on_as_it_was_returned() -> None:
    forward = begun(PARTS, FLOW, 0, None)
    output = (torch.ones(1), torch.full((1,), 2.0))
    call = forward.called("0")
    assert call == ("0", 0)
    forward.keep(call, output)
    output[0].zero_()
    assert values(forward.departure()) == [1.0, 2.0]


def test_what_the_last_call_returned_is_handed_on_uncopied() -> None:
    forward = begun(PARTS, CHAIN, 0, None)
    output = torch.ones(1)
    forward.keep(forward.called("0"), output, copied=False)
    assert forward.departure()[0] is output


@pytest.mark.parametrize(
    ("keep", "words"),
    [(None, r"'0' was not called as in the first step \(call 1\)"), (torch.ones(1), "1 tensors, but 2")],
)
def test_cargo_that_is_missing_or_of_another_number_is_refused(keep: Tensor | None, words: str) -> None:
    forward = begun(PARTS, FLOW, 0, None)
    if keep is not None:
        forward.keep(("0", 0), keep)
    with pytest.raises(RuntimeError, match=words):
        forward.departure()


def test_an_arrival_of_another_number_of_tensors_is_refused() -> None:
    with pytest.raises(RuntimeError, match="2 tensors arrived on stage 2, but 1 were due, the outputs of '1'"):
        begun(PARTS, CHAIN, 2, arrival(1.0, 2.0))


def test_calls_are_numbered_and_run_where_they_were_planned() -> None:
    forward = begun(PARTS, CHAIN, 0, None)
    assert [forward.called("0") for _ in range(2)] == [("0", 0), ("0", 1)]
    assert forward.called("an inner module") == ("an inner module", 0)
    assert forward.chunk_of("2") == 2
    forward.called("2")
    assert forward.chunk_of("1") == 1  # whose stage has left the step
