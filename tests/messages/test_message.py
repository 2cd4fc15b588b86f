"""Tensors in one flat buffer, and out of it again."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel.messages.message import (
    Packet,
    decode,
    encode,
    format_of,
    gradient_format,
    places_in,
    views,
)

TENSORS = [
    torch.randn(3, 5),
    torch.randn(()),
    torch.randn(0, 4),
    torch.arange(7, dtype=torch.uint8),
    torch.tensor([True, False, True]),
    torch.randn(2, 3, dtype=torch.complex64),
    torch.randn(5, dtype=torch.float64, requires_grad=True),
    torch.randn(4).to(torch.bfloat16).requires_grad_(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, 2).T,
    torch.randn(4, 1).expand(4, 3),
]


CPU = torch.device("cpu")


@pytest.mark.parametrize("count", range(len(TENSORS) + 1))
def test_tensors_come_out_as_they_went_in_with_the_words_after_them(count: int) -> None:
    tensors = TENSORS[:count]
    sent, received = (Packet(format_of(tensors), True, CPU) for _ in range(2))
    received.buffer.fill_(255)
    sent.fill(tensors, (-1, 2**40))
    received.buffer.copy_(sent.buffer)
    assert received.words() == (-1, 2**40)
    assert [(t.dtype, t.tolist()) for t in received.tensors] == [(t.dtype, t.tolist()) for t in tensors]
    assert [t.tolist() for t in views(sent.buffer, sent.format)] == [t.tolist() for t in tensors]


def test_a_tensor_lies_in_memory_as_it_did_unless_it_repeats_itself() -> None:
    found = [tensor.stride() for tensor in Packet(format_of(TENSORS[-3:]), False, CPU).tensors]
    assert found == [(60, 1, 15, 3), (1, 2), (3, 1)]


@pytest.mark.parametrize("device", ["cpu", "meta"])  # of both kinds of memory, as far as inference mode goes
def test_a_packet_made_in_inference_mode_may_be_filled_outside(device: str) -> None:
    with torch.inference_mode():  # as in validation; training uses it again
        packet = Packet(format_of([torch.ones(3)]), device == "cpu", torch.device(device))
    packet.fill([torch.ones(3)], (1, 2) if device == "cpu" else None)
    assert device == "meta" or (packet.tensors[0].tolist(), packet.words()) == ([1.0] * 3, (1, 2))


def test_every_tensor_begins_at_a_multiple_of_64_bytes() -> None:
    places, end = places_in(format_of(TENSORS))
    assert all(start % 64 == 0 for start, _ in places) and end % 64 == 0


def test_a_format_comes_out_of_its_bytes() -> None:
    kind = format_of(TENSORS)
    assert decode(encode(kind)) == kind and encode(kind).dtype == torch.uint8
    assert decode(encode(())) == ()


def test_gradients_are_wanted_of_what_requires_them() -> None:
    tensors = [torch.randn(2), torch.randn(3, requires_grad=True), torch.randn((), requires_grad=True)]
    wanted = [((3,), torch.float32, False, ()), ((), torch.float32, False, ()), ((), torch.float64, False, ())]
    assert gradient_format(format_of(tensors)) == tuple(wanted)
    assert gradient_format(format_of(tensors[:1])) == ()
