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


class Packet:
    """A buffer laid out for messages of a format, and what can be known of it before it is filled.

    Args:
        buffer: flat, of :meth:`nbytes`.
        trailer: two words lie behind the tensors.
    """

    __slots__ = ("_words", "buffer", "format", "tensors")

    def __init__(self, buffer: Tensor, format: Format, trailer: bool) -> None:
        self.buffer = buffer
        self.format = format
        self._words: Any = None
        with torch.inference_mode(False):  # in which validation may have made it, and training fills it again
            self.tensors = unpack(buffer, format)
            if trailer:
                # Through numpy on the CPU: two numbers by tensor operations cost ten times as much, on a message's way.
                last = buffer[-TRAILER:]
                self._words = last.numpy().data if buffer.is_cpu else last.view(torch.int64)

    @staticmethod
    def nbytes(format: Format, trailer: bool) -> int:
        return size_of(format) + (TRAILER if trailer else 0)

    @property
    def has_trailer(self) -> bool:
        return self._words is not None

    def fits(self, format: Format, trailer: bool) -> bool:
        """Is it laid out like this?"""
        return self.has_trailer == trailer and self.format == format

    def fill(self, tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(self.tensors, tensors, strict=True):
            place.copy_(tensor.detach())

    def write(self, words: tuple[int, int]) -> None:
        """Two numbers, behind the tensors."""
        if self.buffer.is_cpu:
            _WORDS.pack_into(self._words, 0, *words)
        else:
            self._words.copy_(torch.tensor(words))

    def read(self) -> tuple[int, int]:
        """What :meth:`write` wrote at the other end."""
        status, acknowledged = _WORDS.unpack_from(self._words) if self.buffer.is_cpu else self._words.tolist()
        return status, acknowledged


def encode(actual: Format) -> Tensor:
    """A format as bytes."""
    text = json.dumps([[list(shape), str(dtype).removeprefix("torch."), grad] for shape, dtype, grad in actual])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(description: Tensor) -> Format:
    """Undoes :func:`encode`."""
    fields: list[Any] = json.loads(bytes(description.cpu().tolist()).decode())
    return tuple((tuple(shape), getattr(torch, dtype), bool(grad)) for shape, dtype, grad in fields)
