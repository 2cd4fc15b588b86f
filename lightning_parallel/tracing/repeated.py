"""Finds layers that do something else when they run again on the same inputs, as activation checkpointing runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.absent.origins import FROM_EARLIER_STEP
from lightning_parallel.backward.recompute import without_caches
from lightning_parallel.interception import Interception, can_intercept
from lightning_parallel.private.torch import TorchDispatchMode, tree_leaves
from lightning_parallel.seeding import TorchGenerators
from lightning_parallel.tracing.own_generators import GeneratorsWatched
from lightning_parallel.tracing.recorder import origins_in
from lightning_parallel.tracing.snapshot import StateKept


def unrepeatable(module: nn.Module, layers: Collection[str], trace: Callable[[], Any]) -> set[str]:
    """The names of those of these layers that a second run in a step of the module changes: they keep a state, or draw
    from a generator of their own. ``trace`` makes a trace of the step."""
    found: set[str] = set()
    with ExitStack() as undone:
        interception = Interception()
        undone.callback(interception.remove)
        for name in layers:
            layer = module.get_submodule(name)
            if can_intercept(layer):
                interception.instead(layer, partial(_run_twice, found, name, layer, layer.forward))
        trace()
    return found


def _run_twice(
    found: set[str], name: str, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a layer's forward twice, and return the first output. That the second run saves the same tensors for the
    backward, torch compares in training."""
    args, kwargs = without_caches(args, kwargs)
    drawn_from = torch.get_rng_state()
    with torch.enable_grad(), _Operations() as first:  # as a checkpoint runs it the second time
        output = forward(*args, **kwargs)
    with TorchGenerators(torch.device("cpu")).kept(), StateKept(layer, parameters=False) as state:
        torch.set_rng_state(drawn_from)
        for kept in state.absent():
            kept.memory.origins = frozenset([FROM_EARLIER_STEP])
        generators = GeneratorsWatched(state.generators)
        with torch.enable_grad(), _Operations() as second:
            try:
                again = forward(*args, **kwargs)
            except Exception:  # any: of the second time only, so it is what differs
                found.add(name)
                return output
        # What it makes the first time only, such as a mask, does no harm.
        written = state.written_around().items()
        counts = any(state.is_number(part, attribute) for part, attributes in written for attribute in attributes)
        goes_on = counts or (first.names != second.names and state.is_changed())
        if goes_on or FROM_EARLIER_STEP in origins_in(again) or generators.drawn():
            found.add(name)
    return output


class _Operations(TorchDispatchMode):
    """Records in ``names`` the operations of the code that runs inside, with what they are given: shape, dtype and
    requires_grad of tensors, and plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append((str(func), tuple(map(_described, tree_leaves((args, kwargs))))))
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, int | float | str | bool) else type(value)
