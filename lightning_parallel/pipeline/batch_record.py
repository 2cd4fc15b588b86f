"""Records how a step computes tensors from its batch, for ``replay.py``.

Whatever was computed from parameters, from a layer's output or with random numbers is *foreign*: no other microbatch's
could be known ahead. Tensors that are neither of the batch nor foreign are constants, such as buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.pipeline.replay import Call, Known, Program, Register, Registers, leaves_of, mapped, tensors_of
from lightning_parallel.torch_private import tree_leaves

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


class Record:
    """What a step has done with a batch so far.

    Args:
        leaves: the tensors of the batch, in order.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._calls: list[Call] = []
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
        for tensor in tensors_of(values):
            self._numbers.pop(id(tensor), None)
            self._foreign[id(tensor)] = weakref.ref(tensor)

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take note of a call.

        Returns:
            ``output``; sizes of the batch's tensors as integers that know where they come from.
        """
        if function in _SIZES or function is Tensor.item:
            output = self._sizes(function, args, kwargs, output)
        if function in _SIZES:
            return output
        if function in _VALUES:
            self._read.update(
                leaf for leaf in tree_leaves(output) if isinstance(leaf, int | float) and not isinstance(leaf, Known)
            )
            return output
        results = tensors_of(output)
        written = _written(function, args, kwargs)
        if not results and written is None:
            return output
        if any(map(self.is_foreign, tensors_of((args, kwargs)))) or self._is_opaque(function, args, kwargs):
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
        calls: list[Call] = []
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

        args, kwargs = mapped(args, named), mapped(kwargs, named)
        memory = None if written is None else written.untyped_storage().data_ptr()
        numbers = tuple(self._hold(result) for result in results)
        self._calls.append(Call(function, args, kwargs, numbers, frozenset(reads), memory))

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
