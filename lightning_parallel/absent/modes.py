"""Modes for code that has to go on although values are absent: it gets guesses, and what it writes into is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_parallel.absent.tensor import AbsentMemory, AbsentTensor
from lightning_parallel.private.torch.tensors import VALUE_OF, TorchDispatchMode, tree_leaves


class ValuesGuessed(TorchDispatchMode):
    """Inside, code that needs an absent tensor's value gets a guess, so that it goes on. Every now and then it gets
    another guess, so that a loop until something converges ends.

    Args:
        here: tells whether a tensor's value is guessed for the code that needs it.
        truth: the guess for booleans, such as ``x.isfinite()``.
        number: the guess for other values, rounded up for integer types.

    Raises:
        AbsentValueError: a step has needed too many values.

    Attributes:
        booleans: the number of booleans guessed so far.
    """

    _OFTEN, _TOO_OFTEN = 47, 2000  # a prime, so that each line of a loop gets its turn

    def __init__(self, here: Callable[[AbsentTensor], bool], *, truth: bool = False, number: float = 1.0) -> None:
        super().__init__()
        self._here, self._truth, self._number = here, truth, number
        self.booleans = 0
        self._asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is VALUE_OF and isinstance(args[0], AbsentTensor)
        return self._guess(args[0]) if asks and self._here(args[0]) else func(*args, **(kwargs or {}))

    def _guess(self, tensor: AbsentTensor) -> Any:
        self._asked += 1
        if self._asked > self._TOO_OFTEN:
            tensor.tolist()  # raises AbsentValueError
        other = self._asked % self._OFTEN == 0
        if tensor.dtype is torch.bool:
            self.booleans += 1
            return self._truth is not other
        number = 0.0 if other else self._number
        return number if tensor.dtype.is_floating_point else math.ceil(number)


_WRITES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "add_", "sub_", "mul_", "div_", "copy_"}


class WritesFollowed(TorchFunctionMode):
    """Inside, tensors with values that absent ones are written into (``loss = torch.zeros(()); loss += term``) become
    absent, wherever they are kept, as far as nothing else shares their memory. Afterwards they are as before."""

    def __init__(self) -> None:
        super().__init__()
        self._swapped: list[tuple[Tensor, Tensor]] = []  # tensors, and what holds their values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _WRITES and not isinstance(args[0], AbsentTensor):
            written = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, AbsentTensor)]
            if written:
                self._become_absent(args[0], frozenset().union(*(x.origins for x in written)))
        return func(*args, **kwargs)

    def _become_absent(self, tensor: Tensor, origins: frozenset[str]) -> None:
        kept = AbsentTensor(tensor, tensor.device, AbsentMemory(origins))
        with suppress(RuntimeError):  # a view, or what has views: the write itself is refused
            torch.utils.swap_tensors(tensor, kept)
            self._swapped.append((tensor, kept))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, kept in reversed(self._swapped):
            torch.utils.swap_tensors(tensor, kept)
