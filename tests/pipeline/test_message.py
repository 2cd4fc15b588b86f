"""Tensors in one flat buffer, and out of it again."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel.pipeline.message import (
    TRAILER,
    decode,
    encode,
    format_of,
    gradient_format,
    read_trailer,
    size_of,
    unpack,
    write_trailer,
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
    buffer = torch.full((size_of(kind) + TRAILER,), 255, dtype=torch.uint8)
    for place, tensor in zip(unpack(buffer, kind), tensors, strict=True):
        place.copy_(tensor.detach())
    write_trailer(buffer, (-1, 2**40))
    assert read_trailer(buffer) == (-1, 2**40)
    for found, tensor in zip(unpack(buffer, kind), tensors, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_a_format_comes_out_of_its_bytes() -> None:
    kind = format_of(TENSORS)
    assert decode(encode(kind)) == kind and encode(kind).dtype == torch.uint8
    assert decode(encode(())) == ()


def test_gradients_are_wanted_of_what_requires_them() -> None:
    tensors = [torch.randn(2), torch.randn(3, requires_grad=True), torch.randn((), requires_grad=True)]
    assert gradient_format(format_of(tensors)) == (((3,), torch.float32, False), ((), torch.float32, False))
    assert gradient_format(format_of(tensors[:1])) == ()
