"""Finds layers that do something else when they run again on the same inputs, as activation checkpointing runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_parallel.absent.origins import FROM_EARLIER_STEP
from lightning_parallel.backward.recompute import without_caches
from lightning_parallel.interception import Interception, can_intercept
from lightning_parallel.seeding import Generators
from lightning_parallel.tracing.own_generators import ON_HOST, GeneratorsWatched
from lightning_parallel.tracing.recorder import origins_in
from lightning_parallel.tracing.snapshot import OF_MODULES, StateKept
from lightning_parallel.tracing.trace import Trace


def refuse_unrepeatable(module: nn.Module, layers: Collection[str], traced: Callable[..., Trace]) -> None:
    """Refuse layers that do something else when they run again: they keep a state, have a hook inside that counts or
    collects, or draw from another generator than torch's default one. ``traced`` traces a step of the module, which
    calls them.

    Raises:
        ValueError: one of the layers does.
    """
    found: set[str] = set()
    interception = Interception()
    try:
        with StateKept(module) as state:
            generators = [*state.generators, *ON_HOST]
        inside = {id(part) for name in layers for part in module.get_submodule(name).modules()}
        around = [part for part in module.modules() if id(part) not in inside]
        for name in dict.fromkeys(layers):  # one that is called several times is named for each call
            layer = module.get_submodule(name)
            if can_intercept(layer):
                interception.instead(layer, partial(_run_twice, found, name, layer, around, generators, layer.forward))
        seen = traced()
    finally:
        interception.remove()
    # Modules inside a layer return what has origins of their own, whatever they are given.
    given = [escape.module[0] for escape in seen.escapes.values() if FROM_EARLIER_STEP in escape.needs]
    found.update(name for name in layers if any(part.startswith(f"{name}.") for part in given))
    if found:
        raise ValueError(
            f"activation_checkpointing=True: '{min(found)}' does something else when it runs again on the same inputs: "
            f"it keeps a state, has a hook inside that counts or collects, or draws from another generator than "
            f"torch's default one. Leave activation_checkpointing out."
        )


def _run_twice(
    found: set[str],
    name: str,
    layer: nn.Module,
    around: Sequence[nn.Module],
    generators: Sequence[Any],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a layer's forward twice, and return the first output. That the second run saves the same tensors for the
    backward, torch compares in training."""
    args, kwargs = without_caches(args, kwargs)
    drawn_from = torch.get_rng_state()
    with torch.enable_grad():  # as a checkpoint runs it the second time
        output = forward(*args, **kwargs)
    metrics = [part for part in layer.modules() if isinstance(part, Metric)]
    with Generators(torch.device("cpu")).kept(), StateKept(layer, apart=metrics) as state:
        torch.set_rng_state(drawn_from)
        for kept in state.absent():
            kept.memory.origins = frozenset([FROM_EARLIER_STEP])
        watched, counts = GeneratorsWatched(generators), _counts(around)
        try:
            with torch.enable_grad():
                again = forward(*args, **kwargs)
        except Exception:  # any: of the second time only, so it is what differs
            found.add(name)
            return output
        goes_on = state.goes_on() or _counts(around) != counts
        # What it makes the first time only, such as a mask, does no harm.
        if goes_on or FROM_EARLIER_STEP in origins_in(again) or watched.drawn():
            found.add(name)
    return output


def _counts(parts: Sequence[nn.Module]) -> dict[tuple[int, str], Any]:
    """The numbers that parts keep, and the lengths of their containers. A hook on a module inside a layer may count or
    collect in a part outside."""
    return {
        (id(part), name): len(value) if isinstance(value, Sized) else value
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, int | float | list | dict | set | deque) and name not in OF_MODULES
    }
