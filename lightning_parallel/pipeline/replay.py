"""How a step computes small tensors from its batch, recorded while it runs, and computed again from another batch.

A loss is divided by a number of targets, a mask's sum. The other microbatches' numbers are needed before their forwards
have run. What the user's code does with the batch on the way to that number is kept as a list of calls of torch's
functions. Run on another microbatch, it gives that microbatch's number::

    the user's code                             the record
    labels = F.pad(batch["labels"], (0, 1))     2 = pad(1, (0, 1))
    labels = labels[:, 1:].contiguous()         3 = 2[:, 1:]      4 = contiguous(3)
    loss = F.cross_entropy(logits, labels)      wanted: 4

Numbers are *registers*, which hold tensors: first those of the batch, then one for each result. Whatever was computed
from parameters, from a layer's output or with random numbers is *foreign*: no other microbatch's could be known ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_parallel.torch_private import tree_leaves

Registers = dict[int, Any]


@dataclass(frozen=True, slots=True)
class Register:
    """The place of a tensor in the arguments of a recorded call."""

    number: int


class Ledger(Protocol):
    """What has registers."""

    is_open: bool


class Known(int):
    """An integer that remembers how it came from the batch: a size, or what was computed from sizes.

    Attributes:
        record: to which the registers belong. When it has ended, this is an integer like any other, also where a user
            counts on with it.
        again: computes it from other registers.
        reads: the registers that it needs.
    """

    record: Ledger
    again: Callable[[Registers], int]
    reads: frozenset[int]

    @staticmethod
    def of(value: int, record: Ledger, again: Callable[[Registers], int], reads: frozenset[int]) -> Known:
        known = Known(value)
        known.record, known.again, known.reads = record, again, reads
        return known

    def __add__(self, other: int) -> int:
        return _computed(int.__add__, self, other)

    def __radd__(self, other: int) -> int:
        return _computed(int.__add__, other, self)

    def __sub__(self, other: int) -> int:
        return _computed(int.__sub__, self, other)

    def __rsub__(self, other: int) -> int:
        return _computed(int.__sub__, other, self)

    def __mul__(self, other: int) -> int:
        return _computed(int.__mul__, self, other)

    def __rmul__(self, other: int) -> int:
        return _computed(int.__mul__, other, self)

    def __floordiv__(self, other: int) -> int:
        return _computed(int.__floordiv__, self, other)

    def __rfloordiv__(self, other: int) -> int:
        return _computed(int.__floordiv__, other, self)

    def __neg__(self) -> int:
        return _computed(int.__sub__, 0, self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # copies are plain integers


def _computed(operation: Callable[[int, int], int], a: int, b: int) -> int:
    if not (isinstance(a, int) and isinstance(b, int)):
        return NotImplemented  # Python asks the other operand, such as a float or a list
    value = operation(int(a) if isinstance(a, Known) else a, int(b) if isinstance(b, Known) else b)
    known = [x for x in (a, b) if isinstance(x, Known) and x.record.is_open]
    if not known:
        return value
    left, right = (x if not isinstance(x, Known) or x.record.is_open else int(x) for x in (a, b))
    reads = frozenset[int]().union(*(x.reads for x in known))
    return Known.of(
        value, known[0].record, lambda registers: operation(_again(left, registers), _again(right, registers)), reads
    )


def _again(value: Any, registers: Registers) -> Any:
    if isinstance(value, Register):
        return registers[value.number]
    return value.again(registers) if isinstance(value, Known) else value


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was recorded.

    Attributes:
        function: of torch.
        args, kwargs: its arguments, registers in the place of tensors.
        results: the registers of its results, in their order.
        reads: the registers that it needs.
        memory: where it writes, if in place: the address of the storage.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    reads: frozenset[int]
    memory: int | None

    def run(self, registers: Registers) -> None:
        args = mapped(self.args, lambda leaf: _again(leaf, registers))
        kwargs = mapped(self.kwargs, lambda leaf: _again(leaf, registers))
        results = tensors_of(self.function(*args, **kwargs))
        registers.update(zip(self.results, results, strict=True))


@dataclass(frozen=True)
class Program:
    """The calls that lead to some registers.

    Attributes:
        calls: in order.
        wanted: the registers, and integers that are computed from registers.
        reads_batch: some of them depend on values of the batch, not only on its sizes.
    """

    calls: tuple[Call, ...]
    wanted: tuple[int | Known, ...]
    reads_batch: bool

    @property
    def writes(self) -> bool:
        """Does it write in place?"""
        return any(call.memory is not None for call in self.calls)

    def run(self, leaves: Sequence[Tensor]) -> list[Any]:
        """What is wanted, for a batch of these tensors. The batch stays as it is."""
        registers: Registers = dict(enumerate(leaf.clone() if self.writes else leaf for leaf in leaves))
        with torch.no_grad():
            for call in self.calls:
                call.run(registers)
        return [x.again(registers) if isinstance(x, Known) else registers[x] for x in self.wanted]


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A nested structure of arguments with ``function`` applied to its leaves. torch's own walk doesn't enter slices
    and sizes."""
    if isinstance(value, slice):
        return slice(*(mapped(x, function) for x in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, torch.Size):
        inside = [mapped(x, function) for x in value]
        return inside if type(value) is list else tuple(inside)
    if type(value) is dict:
        return {key: mapped(x, function) for key, x in value.items()}
    return function(value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nested structure."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list):  # torch's walk is slow
        return [tensor for inside in value for tensor in tensors_of(inside)]
    if type(value) is dict:
        return [tensor for inside in value.values() for tensor in tensors_of(inside)]
    if isinstance(value, slice):
        return tensors_of([value.start, value.stop, value.step])
    if value is None or isinstance(value, int | float | str | torch.Size | torch.dtype | torch.device):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def leaves_of(value: Any) -> list[Any]:
    """The leaves of arguments, those in slices and sizes too."""
    leaves: list[Any] = []
    mapped(value, leaves.append)
    return leaves
