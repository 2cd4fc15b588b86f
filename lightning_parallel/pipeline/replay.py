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

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.torch_private import tree_leaves

Registers = dict[int, Any]

_SIZES = frozenset({Tensor.size, Tensor.numel, Tensor.nelement, Tensor.shape.__get__, torch.numel})  # type: ignore[attr-defined]
_VALUES = frozenset({Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.item, Tensor.tolist})
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
_RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "binomial", "random_", "uniform_", "normal_", "bernoulli_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "rrelu",
}  # fmt: skip
# They change neither the number of elements nor the elements. A step writes sizes into them that it read elsewhere.
_LAYOUT = {
    "view", "reshape", "flatten", "unflatten", "contiguous", "ravel", "squeeze", "unsqueeze", "transpose", "permute",
    "swapaxes", "movedim", "t", "__get__", "view_as", "reshape_as", "clone", "detach",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Register:
    """The place of a tensor in the arguments of a recorded call."""

    number: int


class Known(int):
    """An integer that remembers how it came from the batch: a size, or what was computed from sizes.

    Attributes:
        record: to which the registers belong. When it has ended, this is an integer like any other, also where a user
            counts on with it.
        again: computes it from other registers.
        reads: the registers that it needs.
    """

    record: Record
    again: Callable[[Registers], int]
    reads: frozenset[int]

    @staticmethod
    def of(value: int, record: Record, again: Callable[[Registers], int], reads: frozenset[int]) -> Known:
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
    value = operation(int(a) if isinstance(a, Known) else a, int(b) if isinstance(b, Known) else b)
    known = [x for x in (a, b) if isinstance(x, Known) and x.record.is_open]
    if value is NotImplemented or not known:
        return value  # or Python asks the other operand, such as a float
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
class _Call:
    """Attributes:
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
        args = _mapped(self.args, lambda leaf: _again(leaf, registers))
        kwargs = _mapped(self.kwargs, lambda leaf: _again(leaf, registers))
        results = [leaf for leaf in tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        registers.update(zip(self.results, results, strict=True))


@dataclass(frozen=True)
class Program:
    """The calls that lead to some registers.

    Attributes:
        calls: in order.
        wanted: the registers, and integers that are computed from registers.
        reads_batch: some of them depend on values of the batch, not only on its sizes.
    """

    calls: tuple[_Call, ...]
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


class Record:
    """What a step has done with a batch so far.

    Args:
        leaves: the tensors of the batch, in order.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._calls: list[_Call] = []
        self._held: list[Tensor] = []  # by register: while they live, their ids are theirs
        self._numbers: dict[int, int] = {}  # registers by the tensors' ids
        self._foreign: dict[int, weakref.ref[Tensor]] = {}
        self._read: set[Any] = set()  # numbers that left torch
        self.is_open = True
        self._leaves = len(leaves)
        for leaf in leaves:
            self._hold(leaf)

    def end(self) -> None:
        """Nothing more is noted."""
        self.is_open = False
        self._calls, self._held = [], []
        self._numbers, self._foreign, self._read = {}, {}, set()

    def register(self, tensor: Tensor) -> int | None:
        """Of a tensor that comes from the batch and from constants; None for any other."""
        return self._numbers.get(id(tensor))

    def is_foreign(self, tensor: Tensor) -> bool:
        """Does it come from the model, or from random numbers? All else that has no register is a constant."""
        if id(tensor) in self._numbers:
            return False
        return tensor.requires_grad or isinstance(tensor, AbsentTensor) or self.is_marked(tensor)

    def is_marked(self, tensor: Tensor) -> bool:
        """Has it been marked as foreign, or found to be?"""
        known = self._foreign.get(id(tensor))
        return known is not None and known() is tensor

    def mark_foreign(self, values: Any) -> None:
        """Tensors of a nested structure come from the model."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._numbers.pop(id(leaf), None)
                self._foreign[id(leaf)] = weakref.ref(leaf)

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take note of a call.

        Returns:
            ``output``; sizes of the batch's tensors as integers that know where they come from.
        """
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if function in _SIZES or function is Tensor.item:
            output = self._sizes(function, args, kwargs, output)
        if function in _SIZES:
            return output
        if function in _VALUES:
            self._read.update(
                leaf for leaf in tree_leaves(output) if isinstance(leaf, int | float) and not isinstance(leaf, Known)
            )
            return output
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        written = _written(function, args, kwargs)
        if not results and written is None:
            return output
        if any(map(self.is_foreign, given)) or self._is_opaque(function, args, kwargs):
            self.mark_foreign(results)
            if written is not None:
                self._lose(written)
            return output
        if written is not None and self.register(written) is None:
            self.mark_foreign(written)  # a constant no more
            self.mark_foreign(results)
            return output
        self._keep(function, args, kwargs, results, written)
        return output

    def was_read(self, number: float) -> bool:
        """Is it a value that the step has read from a tensor?"""
        return number in self._read

    def tensor(self, register: int) -> Tensor:
        """The tensor of a register."""
        return self._held[register]

    def program(self, wanted: Iterable[int | Known], *, counted: bool = False) -> Program:
        """The calls that lead to some registers, or to integers.

        Args:
            wanted: the registers and integers.
            counted: only the elements of the tensors matter, not their shape.
        """
        numbers = list(wanted)
        if counted and not any(call.memory is not None for call in self._calls):
            numbers = [x if isinstance(x, Known) else self._before_layout(x) for x in numbers]
        needed: set[int] = set().union(*(x.reads if isinstance(x, Known) else {x} for x in numbers))
        memory = {self._memory(number) for number in needed}
        calls: list[_Call] = []
        for call in reversed(self._calls):
            if needed.isdisjoint(call.results) and (call.memory is None or call.memory not in memory):
                continue
            calls.append(call)
            needed |= call.reads
            memory |= {self._memory(number) for number in call.reads}
        inside = (leaf for call in calls for leaf in leaves_of((call.args, call.kwargs)))
        used = {x.number for x in inside if isinstance(x, Register)}.union(
            x for x in numbers if not isinstance(x, Known)
        )
        return Program(tuple(reversed(calls)), tuple(numbers), any(number < self._leaves for number in used))

    def _before_layout(self, number: int) -> int:
        made = {result: call for call in self._calls for result in call.results}
        while number in made:
            call = made[number]
            first = call.args[0] if call.args else None
            if getattr(call.function, "__name__", "") not in _LAYOUT or not isinstance(first, Register):
                break
            if self._held[first.number].numel() != self._held[number].numel():
                break
            number = first.number
        return number

    def _keep(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        written: Tensor | None,
    ) -> None:
        reads: set[int] = set()

        def named(leaf: Any) -> Any:
            if isinstance(leaf, Known):
                if leaf.record is not self:
                    return int(leaf)
                reads.update(leaf.reads)
            elif isinstance(leaf, Tensor):
                number = self.register(leaf)
                if number is not None:
                    reads.add(number)
                    return Register(number)
            return leaf

        args, kwargs = _mapped(args, named), _mapped(kwargs, named)
        memory = None if written is None else written.untyped_storage().data_ptr()
        numbers = tuple(self._hold(result) for result in results)
        self._calls.append(_Call(function, args, kwargs, numbers, frozenset(reads), memory))

    def _sizes(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        number = self.register(args[0]) if args else None
        if number is None or isinstance(output, bool) or not isinstance(output, int | torch.Size):
            return output
        rest, reads = args[1:], frozenset([number])

        def again(registers: Registers) -> Any:
            return function(registers[number], *rest, **kwargs)

        def one(place: int, size: int) -> Known:
            return Known.of(size, self, lambda registers: again(registers)[place], reads)

        if isinstance(output, torch.Size):
            return torch.Size([one(place, size) for place, size in enumerate(output)])
        return Known.of(output, self, again, reads)

    def _is_opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Do its results depend on what isn't recorded: random numbers, or values that the step has read?"""
        if getattr(function, "__name__", "") in _RANDOM:
            return True
        if function in _FROM_PYTHON and not isinstance(args[0] if args else None, Tensor | int | float | bool):
            return True
        if not self._read:
            return False
        return any(
            isinstance(leaf, int | float)
            and not isinstance(leaf, bool | Known)
            and leaf not in (0, 1, -1)
            and leaf in self._read
            for leaf in leaves_of((args, kwargs))
        )

    def _lose(self, written: Tensor) -> None:
        """A tensor, and all that share its memory, hold foreign values from now on."""
        if id(written) not in self._numbers:
            self.mark_foreign(written)
            return
        memory = written.untyped_storage().data_ptr()
        self.mark_foreign([held for held in self._held if held.untyped_storage().data_ptr() == memory])

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        self._numbers[id(tensor)] = len(self._held) - 1
        return len(self._held) - 1

    def _memory(self, number: int) -> int:
        return self._held[number].untyped_storage().data_ptr()


def _written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a call writes in place."""
    name = getattr(function, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name == "__set__"
    target = args[0] if in_place and args else kwargs.get("out")
    return target if isinstance(target, Tensor) else None


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A nested structure of arguments with ``function`` applied to its leaves. torch's own walk doesn't enter slices
    and sizes."""
    if isinstance(value, slice):
        return slice(*(_mapped(x, function) for x in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, torch.Size):
        inside = [_mapped(x, function) for x in value]
        return inside if type(value) is list else tuple(inside)
    if type(value) is dict:
        return {key: _mapped(x, function) for key, x in value.items()}
    return function(value)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of arguments, those in slices and sizes too."""
    leaves: list[Any] = []
    _mapped(value, leaves.append)
    return leaves
