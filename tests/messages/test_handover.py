"""What one chunk of a stage hands to the next is its own, in order, and comes back as gradients."""

from __future__ import annotations

import torch

from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.messages.handover import Handover
from tests.pipeline.by_hand import arrived


def test_activations_are_copies_in_the_order_in_which_they_were_sent() -> None:
    ways = Handover()
    first, second = torch.ones(2, requires_grad=True) * 1, torch.zeros(3)
    assert ways.send([first], place=0) == (((2,), torch.float32, True, ()),)
    ways.send([second], place=1)
    arrival = Arrival(*ways.take())
    assert ways.sent == 2
    (received,) = arrival.receive()
    assert received.requires_grad and arrival.anchor is not None
    with torch.no_grad():
        received.mul_(5)
    assert torch.equal(first, torch.ones(2))
    (received,), _ = ways.take()
    assert not received.requires_grad and received.shape == (3,)


def test_gradients_are_not_written_to_when_others_are_added_to() -> None:
    """Nor are those that go over a link: ``test_message.py``."""
    ways, shift = Handover(), torch.zeros(4, requires_grad=True)
    for number in (1, 2, 3):
        arrival = arrived([torch.ones(1, 4)], [True])
        (x,) = arrival.receive()
        output = x + shift[None]
        output.backward(torch.full_like(output, number))  # one memory for the gradients of both
        ways.send(arrival.gradients(), place=())
    assert [ways.take()[0][0].tolist() for _ in range(3)] == [[[float(number)] * 4] for number in (1, 2, 3)]
