"""Finds parameters that a step changes in place. That goes wrong where a rank holds a part of them, or a temporary
copy.

They are found by their values, since a write to ``weight.data`` doesn't raise a tensor's version. This reads the
parameters twice a step, so only the first two steps are watched. One step isn't enough: a mask changes nothing in
weights that are masked already, until the optimizer has changed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.private.torch.tensors import TorchDispatchMode, tensors_in, written_arguments
from lightning_parallel.ranks.collectives import MESSAGE, Group, buckets, gather_objects
from lightning_parallel.ranks.local_model import memory_of

_STEPS = 2  # that are watched
_COLUMNS = 1021  # a prime, so that entries below each other in a matrix rarely have one weight


class Writes:
    """Watches parameters while a step's code runs, in the first steps. ``error`` is the text of the error, with ``{}``
    for a parameter's name."""

    def __init__(self, error: str, group: Group) -> None:
        self._error, self._group = error, group
        self._left = _STEPS
        self._before: dict[str, tuple[int, Tensor]] = {}
        self._found: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Is the current step one of the first, which are watched?"""
        return self._left > 0

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Note the state of these parameters before code runs that must not change them."""
        if self.is_on:
            self._before |= {name: _state_of(parameter) for name, parameter in parameters.items()}

    def end(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compare them after that code. Parameters not passed to :meth:`begin` are ignored."""
        for name, parameter in parameters if self._before else ():
            if name in self._before:
                memory, digest = self._before.pop(name)
                new_memory, new_digest = _state_of(parameter)
                if new_memory != memory or not torch.equal(new_digest, digest):
                    self._found.add(name)

    def check(self) -> None:
        """End a step. All ranks of the group call it.

        Raises:
            ValueError: on all ranks, if one has found a change.
        """
        if not self.is_on:
            return
        self._left -= 1
        found = sorted(set().union(*gather_objects(self._found, self._group)))
        if found:
            raise ValueError(self._error.format(found[0]))


class WritesRefused(TorchDispatchMode):
    """Inside, a write to one of these tensors raises a RuntimeError before it is made. What reads a graph is to stay
    outside: under a mode torch passes on the numbers that a graph has saved as plain ones."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._memories = {memory_of(tensor) for tensor in tensors} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = tensors_in([*written_arguments(func, args, kwargs or {})])
        if any(memory_of(tensor) in self._memories for tensor in written):
            raise RuntimeError(f"{func} writes to what a trial must not change.")
        return func(*args, **(kwargs or {}))


def _state_of(tensor: Tensor) -> tuple[int, Tensor]:
    """The address of a tensor (``weight.data = ...`` replaces it), and its digest."""
    return tensor.data_ptr(), digest(tensor)


def digest(*tensors: Tensor) -> Tensor:
    """One number for the bits of these tensors of one device, in their order. A change of one entry always alters it,
    and so does an exchange of two, unless they lie a multiple of 8,168 bytes apart. Small tensors are read together."""
    raw = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=total.device)
    pieces = (piece for each in raw for piece in each.split(MESSAGE))
    for bucket in buckets(pieces, lambda piece: piece.nbytes, lambda piece: piece.device):
        padding = bucket[0].new_zeros(-sum(piece.numel() for piece in bucket) % (8 * _COLUMNS))
        sums = torch.cat([*bucket, padding]).view(torch.int64).view(-1, _COLUMNS).sum(0)
        sums += 3 * (sums >> 32)  # or an even multiple would lose the highest bit
        total = (sums * weights).sum() + 31 * total
    return total


def digest_of_all(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The :func:`digest` of all these tensors, in their order, on each of their devices."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return tuple(int(digest(*each)) for each in by_device.values())
