"""A message between stages as bytes: tensors in one flat buffer, and a trailer of two words (``channel.py``)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Format = tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]  # shape, dtype, requires_grad of each tensor

_ALIGNMENT = 64  # bytes; any dtype can be viewed at such an offset
_WORDS = struct.Struct("=qq")
TRAILER = _WORDS.size  # bytes


def format_of(tensors: Sequence[Tensor]) -> Format:
    """Of a message of these."""
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


@lru_cache
def gradient_format(activations: Format) -> Format:
    """The format of the gradients of a message: those of the tensors that want one."""
    return tuple((shape, dtype, False) for shape, dtype, requires_grad in activations if requires_grad)


def size_of(expected: Format) -> int:
    """Of the tensors in a buffer, in bytes."""
    return _layout(expected)[1]


@lru_cache
def _layout(expected: Format) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor lies in a buffer (start, length), and where the tensors end, in bytes."""
    places: list[tuple[int, int]] = []
    end = 0
    for shape, dtype, _ in expected:
        size = math.prod(shape) * dtype.itemsize
        places.append((end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


def unpack(buffer: Tensor, expected: Format) -> list[Tensor]:
    """The tensors in a buffer: views of it."""
    return [
        buffer.narrow(0, start, size).view(dtype).view(shape)
        for (start, size), (shape, dtype, _) in zip(_layout(expected)[0], expected, strict=True)
    ]


# Through numpy on the CPU: two numbers by tensor operations cost ten times as much, on every message's way.


def write_trailer(buffer: Tensor, words: tuple[int, int]) -> None:
    """Two numbers, behind the tensors."""
    if buffer.is_cpu:
        _WORDS.pack_into(buffer.numpy().data, buffer.numel() - TRAILER, *words)
    else:
        buffer[-TRAILER:].view(torch.int64).copy_(torch.tensor(words))


def read_trailer(buffer: Tensor) -> tuple[int, int]:
    """Undoes :func:`write_trailer`."""
    if buffer.is_cpu:
        status, acknowledged = _WORDS.unpack_from(buffer.numpy().data, buffer.numel() - TRAILER)
    else:
        status, acknowledged = buffer[-TRAILER:].view(torch.int64).tolist()
    return status, acknowledged


def encode(actual: Format) -> Tensor:
    """A format as bytes."""
    text = json.dumps([[list(shape), str(dtype).removeprefix("torch."), grad] for shape, dtype, grad in actual])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(description: Tensor) -> Format:
    """Undoes :func:`encode`."""
    fields: list[Any] = json.loads(bytes(description.cpu().tolist()).decode())
    return tuple((tuple(shape), getattr(torch, dtype), bool(grad)) for shape, dtype, grad in fields)
