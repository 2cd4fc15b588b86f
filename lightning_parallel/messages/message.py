"""A message between stages as bytes: a packet, with tensors in one flat buffer, and, in host memory, perhaps a
trailer of two words::

    [ tensor 0 ... | tensor 1 ... | ... | word, word ]
      ^ each begins at a multiple of 64 bytes; a word has 8 bytes

``channel.py`` says when packets are sent, and what the words mean.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Described(NamedTuple):
    """What a message says of one of its tensors.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        requires_grad: does its sender want a gradient? In a gradient's format: does it stand for None
            (:data:`~.arrival.NO_GRADIENT`)?
        order: its dimensions by their place in memory, the outermost first; empty if they are in order. So what is
            channels_last before a cut is channels_last behind it, as the next convolution wants it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = ()


Format = tuple[Described, ...]

_ALIGNMENT = 64  # bytes; any dtype can be viewed at such an offset
_WORDS = struct.Struct("=qq")
TRAILER = _WORDS.size  # bytes
_NOTHING = nullcontext()


def format_of(tensors: Sequence[Tensor]) -> Format:
    """The format of a message with these tensors."""
    return tuple(
        [Described(tuple(t.shape), t.dtype, t.requires_grad, () if t.is_contiguous() else _order(t)) for t in tensors]
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions, the outermost in memory first. A tensor with gaps or repetitions in memory is sent without them:
    its dimensions are in order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


@lru_cache
def gradient_format(activations: Format) -> Format:
    """The format of the gradients of a message: one for each tensor that wants one, then the factor of the batch's
    gradients (``losses/normaliser.py``). Empty if none wants one."""
    gradients = tuple(each._replace(requires_grad=False) for each in activations if each.requires_grad)
    return (*gradients, Described((), torch.float64, False)) if gradients else ()


@lru_cache
def places_in(format: Format) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor lies in a packet (start and length), and where a trailer begins, in bytes."""
    places: list[tuple[int, int]] = []
    end = 0
    for shape, dtype, *_ in format:
        size = math.prod(shape) * dtype.itemsize
        places.append((end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


class Packet:
    """A buffer laid out for messages of one format.

    Args:
        format: the format of the tensors.
        trailer: whether two words follow the tensors; only in host memory.
        pinned: the buffer is in pinned host memory, whatever ``device`` is.

    Attributes:
        buffer: a flat tensor of uint8.
        tensors: views of the buffer.
    """

    __slots__ = ("_words", "buffer", "format", "tensors")

    def __init__(self, format: Format, trailer: bool, device: torch.device, pinned: bool = False) -> None:
        self.format = format
        places, end = places_in(format)
        # Without a trailer as long as a tensor that is sent as it lies: without the padding after the last one.
        without = sum(places[-1]) if places else 0
        nbytes = end + TRAILER if trailer else without
        # Validation may make a packet that training fills again.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            if pinned:
                self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.tensors = views(self.buffer, format)
            self._words: Any = None
            if trailer:  # through numpy: tensor operations would take ten times as long, while a message waits
                self._words = self.buffer[-TRAILER:].numpy().data

    def fill(self, tensors: Sequence[Tensor], words: tuple[int, int] | None = None, wait: bool = True) -> Packet:
        """Copy tensors to their places, and write the trailer's words if there is a trailer. Without tensors, the
        places keep what they hold. If not ``wait``, copies from a GPU into pinned memory are only launched, and the
        caller has to wait for them before the buffer is read."""
        for place, tensor in zip(self.tensors, tensors, strict=bool(tensors)):
            place.copy_(tensor.detach(), non_blocking=not wait)
        if words is not None:
            _WORDS.pack_into(self._words, 0, *words)
        return self

    def words(self) -> tuple[int, int]:
        """The trailer's words, as the sender's :meth:`fill` wrote them."""
        first, second = _WORDS.unpack_from(self._words)
        return first, second


def views(buffer: Tensor, format: Format) -> list[Tensor]:
    """The tensors in a buffer that is laid out for messages of a format."""
    found: list[Tensor] = []
    for (start, size), (shape, dtype, _, order) in zip(places_in(format)[0], format, strict=True):
        flat = buffer.narrow(0, start, size).view(dtype)
        if order:
            in_order = [order.index(dim) for dim in range(len(order))]
            found.append(flat.view([shape[dim] for dim in order]).permute(in_order))
        else:
            found.append(flat.view(shape))
    return found


def encode(format: Format) -> Tensor:
    """A format as bytes."""
    text = json.dumps([[shape, str(dtype).removeprefix("torch."), *others] for shape, dtype, *others in format])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(description: Tensor) -> Format:
    """The inverse of :func:`encode`."""
    fields: list[Any] = json.loads(bytes(description.tolist()).decode())
    return tuple(
        Described(tuple(shape), getattr(torch, dtype), bool(grad), tuple(order)) for shape, dtype, grad, order in fields
    )
