"""Seeing torch's functions in a step, outside the layers, and giving the terms of a loss their divisors.

A mode of torch's is entered for a microbatch's step on the last stage. Inside the layers, where most functions are
called, it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.averaging import Average, average
from lightning_parallel.pipeline.loss_terms import LossTerms, Term, changed, check, numbers
from lightning_parallel.pipeline.replay import tensors_of
from lightning_parallel.torch_private import current_function_mode


class Watching(TorchFunctionMode):
    """Sees torch's functions in a step, outside the layers.

    Args:
        terms: of the batch.
        number: of the microbatch.
    """

    def __init__(self, terms: LossTerms, number: int) -> None:
        super().__init__()
        self.terms, self.number = terms, number
        self._depth = 0  # of modules in which it doesn't watch
        self._left = False
        self._divided: dict[int, Tensor] = {}  # results that depend on another divisor than the call's own, by id
        self._numbers: set[float] = set()  # those that left torch

    @torch.compiler.disable
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._depth:
            return func(*args, **kwargs)
        found = average(func, args, kwargs)
        output = self.call(func, args, kwargs, found)
        if self._divided:
            self._follow(args, output)
        return output

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Average | None
    ) -> Any:
        """One call of the user's code, which averages as ``found`` says."""
        raise NotImplementedError

    def is_divided(self, value: Any) -> bool:
        """Was a value computed from a term that another divisor was given? Then its mean over microbatches is weighted
        by samples, whatever the user's own weights are."""
        if isinstance(value, Tensor):
            return id(value) in self._divided
        return isinstance(value, float) and value in self._numbers

    def divided(self, average: Average, term: Term, function: Callable[[], Tensor]) -> Tensor:
        """The term in this microbatch."""
        divisor = self.terms.divisor(term, self.number)
        if divisor is None:
            return function()
        output = average.divided(divisor)
        self._divided[id(output)] = output
        return output

    def _follow(self, args: tuple[Any, ...], output: Any) -> None:
        if not any(id(tensor) in self._divided for tensor in tensors_of(args)):
            return
        if isinstance(output, float):
            self._numbers.add(output)
        self._divided.update((id(tensor), tensor) for tensor in tensors_of(output))

    def end(self) -> None:
        """After the step."""
        self._divided, self._numbers = {}, set()

    def leave(self) -> None:
        """A module is entered in which nothing is watched."""
        self._depth += 1
        if self._depth == 1 and current_function_mode() is self:  # else a mode of the user's lies on top
            self._left = True
            super().__exit__(None, None, None)

    def return_with(self, output: Any) -> None:
        """That module has returned."""
        self._depth -= 1
        if self._depth == 0 and self._left:
            self._left = False
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self._left:
            super().__exit__(*error)


class Playing(Watching):
    """A later microbatch, whose terms are known from the first one. Arguments as for :class:`Watching`."""

    def __init__(self, terms: LossTerms, number: int) -> None:
        super().__init__(terms, number)
        self._calls = 0

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Average | None
    ) -> Any:
        if found is None:
            return function(*args, **kwargs)
        place, self._calls = self._calls, self._calls + 1
        term = self.terms.terms[place] if place < len(self.terms.terms) else None
        if term is None:
            return function(*args, **kwargs)
        if term.name != found.name:
            raise changed(f"The loss is made of other calls in microbatch {self.number} than in the first one")
        if self.terms.checks:
            (own,) = numbers([found.divisor(*found.given)])
            check(self.terms, term, self.number, own)
        return self.divided(found, term, partial(function, *args, **kwargs))

    def end(self) -> None:
        super().end()
        if self._calls != len(self.terms.terms):
            raise changed(
                f"The step makes {self._calls} calls that average in microbatch {self.number}, but "
                f"{len(self.terms.terms)} in the first one"
            )


@contextmanager
def kept_out_of(modes: Callable[[], Watching | None], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, no mode watches what the modules do.

    Args:
        modes: gives the mode that watches now, if one does.
        modules: in which it shouldn't.
    """

    @torch.compiler.disable
    def before(module: nn.Module, args: Any) -> None:
        mode = modes()
        if mode is not None:
            mode.leave()

    @torch.compiler.disable
    def after(module: nn.Module, args: Any, output: Any) -> None:
        mode = modes()
        if mode is not None:
            mode.return_with(output)

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
