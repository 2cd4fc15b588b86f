"""Steps of optimizers that begin when their closure has run, which is Lightning's whole batch.

Some optimizers count, or look up their state, before they call the closure. Whatever replaces or undoes an earlier step
in the closure would come too late for these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_parallel.values import changed


def closure_first(optimizer: Optimizer, around: Callable[[], AbstractContextManager[None]], until: ExitStack) -> None:
    """Let ``optimizer.step`` run the closure it is given, and then the step, inside the context that ``around`` makes,
    until the stack is closed. ``around`` is called before the closure, and may refuse the step."""
    step = optimizer.step

    @functools.wraps(step)  # with a scheduler's marks
    def stepped(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        context = around()
        if closure is not None:
            with torch.enable_grad():
                kwargs["closure"] = only_once(closure())
        with context:
            return step(**kwargs)

    # A method, since schedulers take it for one.
    until.enter_context(changed([(vars(optimizer), "step", MethodType(stepped, optimizer))]))


def only_once(result: Any) -> Callable[[], Any]:
    """A closure that returns a result, for an optimizer that calls it once.

    Raises:
        RuntimeError: at the second call.
    """
    results = [result]

    def closure() -> Any:
        if not results:
            raise RuntimeError("The optimizer calls its closure twice in a step, and its gradients are of the first.")
        return results.pop()

    return closure
