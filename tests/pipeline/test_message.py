"""Tensors in one flat buffer, and out of it again."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel.pipeline.message import (
    Packet,
    decode,
    encode,
    format_of,
    gradient_format,
    unpack,
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
]


@pytest.mark.parametrize("count", range(len(TENSORS) + 1))
def test_tensors_come_out_as_they_went_in_with_the_trailer_behind_them(count: int) -> None:
    tensors = TENSORS[:count]
    kind = format_of(tensors)
    sent, received = (
        Packet(torch.full((Packet.nbytes(kind, trailer=True),), 255, dtype=torch.uint8), kind, trailer=True)
        for _ in range(2)
    )
    sent.fill(tensors)
    sent.write((-1, 2**40))
    received.buffer.copy_(sent.buffer)
    assert received.has_trailer and received.read() == (-1, 2**40)
    for found in (received.tensors, unpack(received.buffer, kind)):
        assert [(t.dtype, t.tolist()) for t in found] == [(t.dtype, t.tolist()) for t in tensors]


def test_a_packet_without_a_trailer_is_its_tensors_alone() -> None:
    kind = format_of([torch.ones(16)])
    packet = Packet(torch.empty(Packet.nbytes(kind, trailer=False), dtype=torch.uint8), kind, trailer=False)
    packet.fill([torch.ones(16)])
    assert not packet.has_trailer and packet.buffer.view(torch.float32).tolist() == [1.0] * 16


@pytest.mark.parametrize("device", ["cpu", "meta"])  # of both kinds of memory, as far as inference mode goes
def test_a_packet_made_in_inference_mode_may_be_filled_outside(device: str) -> None:
    kind = format_of([torch.ones(3)])
    with torch.inference_mode():  # as in validation; training uses it again
        buffer = torch.empty(Packet.nbytes(kind, trailer=True), dtype=torch.uint8, device=device)
        packet = Packet(buffer, kind, trailer=True)
    packet.fill([torch.ones(3)])
    packet.write((1, 2))
    assert device == "meta" or (packet.tensors[0].tolist(), packet.read()) == ([1.0] * 3, (1, 2))


def test_a_format_comes_out_of_its_bytes() -> None:
    kind = format_of(TENSORS)
    assert decode(encode(kind)) == kind and encode(kind).dtype == torch.uint8
    assert decode(encode(())) == ()


def test_gradients_are_wanted_of_what_requires_them() -> None:
    tensors = [torch.randn(2), torch.randn(3, requires_grad=True), torch.randn((), requires_grad=True)]
    assert gradient_format(format_of(tensors)) == (((3,), torch.float32, False), ((), torch.float32, False))
    assert gradient_format(format_of(tensors[:1])) == ()
