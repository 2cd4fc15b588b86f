"""What arrives may be worked on in place, and gets a gradient for whatever wants one."""

from __future__ import annotations

import torch

from lightning_parallel.messages.arrival import NO_GRADIENT
from tests.pipeline.by_hand import arrived


def test_what_arrives_in_one_message_is_changed_in_place_one_by_one() -> None:
    buffer = torch.arange(8.0)
    arrival = arrived([buffer[:4], buffer[4:6], buffer[6:]], [True, False, False])
    live, kept, changed = arrival.receive()
    weight = torch.ones(2, requires_grad=True)
    loss = (kept * weight).sum() + live.mul_(2).sum()  # `kept` is needed in the backward
    changed.add_(1)
    loss.backward()
    assert torch.equal(arrival.gradients()[0], torch.full((4,), 2.0))
    assert torch.equal(weight.grad, torch.tensor([4.0, 5.0]))  # type: ignore[arg-type]


def test_a_tensor_without_influence_on_the_loss_gets_no_gradient() -> None:
    arrival = arrived([torch.ones(2), torch.ones(3), torch.ones(4)], [True, False, True])
    first, _, _ = arrival.receive()
    first.sum().backward()
    found, missing = arrival.gradients()
    assert found.tolist() == [1.0, 1.0] and missing is NO_GRADIENT
    arrival = arrived([torch.ones(2)], [True])
    arrival.receive()
    assert arrival.gradients() == [NO_GRADIENT]
