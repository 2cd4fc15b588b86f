"""Finds pairs of linear layers that may be divided, in one run of the model.

In the run every value is one of three things: no activation at all (a parameter, a mask), a whole activation, or made
of the outputs of some linear layers and nothing else::

    x (whole) --+-- q --+
                +-- k --+-- softmax(q k) v --- out --- + x      out's input is made of {q, k, v}
                +-- v --+
      (whole) ----- up ----- gelu ------------ down -- + x      down's input is made of {up}

Layers whose outputs all end in one other layer's input, with no whole activation mixed in, may be columns, and that one
their row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.batch import cloned
from lightning_parallel.interception import Interception
from lightning_parallel.private.torch.tensors import tensors_in
from lightning_parallel.tensor.linear import is_linear

Label = frozenset[str] | None  # linear layers by name; the empty set for a whole activation; None for no activation
_WHOLE: Label = frozenset()


@dataclass(frozen=True)
class Pair:
    """Linear layers that may be divided by output features (``columns``, in the order of calls), and the one that takes
    their outputs (``row``), by name. ``around`` is the smallest module that is called and holds all of them; ``call``
    are the arguments of its first call."""

    columns: tuple[str, ...]
    row: str
    around: str = field(default="", compare=False)
    call: Any = field(default=((), {}), compare=False)


class _Labels(TorchFunctionMode):
    """A mode that labels the results of torch's functions by what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: set[str] = set()  # layers whose outputs have met a whole activation
        self._labels = WeakIdKeyDictionary()  # by tensor

    def of(self, values: Any) -> Label:
        labels: list[Label] = [self._labels.get(x) for x in tensors_in(values)]
        known = [label for label in labels if label is not None]
        if not known:
            return None
        made = frozenset[str]().union(*known)
        if _WHOLE in known:
            self.mixed |= made
            return _WHOLE
        return made

    def put(self, values: Any, label: Label) -> None:
        for x in tensors_in(values):
            if x.is_floating_point() or x.is_complex():
                self._labels[x] = label

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        label = self.of((args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        self.put(args[0] if func is Tensor.__setitem__ else result, label)
        return result


def find_pairs(module: nn.Module, run: Callable[[], Any]) -> list[Pair]:
    """Find the pairs of ``module``, in the order of calls, by ``run()``, which runs it and must not raise."""
    labels = _Labels()
    inputs: dict[str, list[Label]] = {}
    calls: dict[str, Any] = {}
    hooks = Interception()

    def before(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        made = labels.of((args, kwargs))
        if is_linear(layer):
            inputs.setdefault(name, []).append(made)
        else:
            labels.mixed |= made or frozenset()

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:
            calls[name] = cloned((args, kwargs))

    def after(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        labels.put(output, frozenset({name}) if is_linear(layer) else _WHOLE)

    for name, layer in module.named_modules():
        if any(is_linear(child) for child in layer.modules() if child is not layer):
            hooks.before(layer, partial(keep, name))
        elif any(True for _ in layer.parameters(recurse=False)):
            hooks.before(layer, partial(before, name))
            hooks.after(layer, partial(after, name), first=False)
    try:
        with labels, torch.no_grad():
            run()
    finally:
        hooks.remove()
    takers: dict[str, set[str]] = {}
    for name, given in inputs.items():
        for label in given:
            for maker in label or ():
                takers.setdefault(maker, set()).add(name)
    pairs: list[Pair] = []
    rows: set[str] = set()
    for name, given in inputs.items():
        makers = given[0]
        if not makers or any(label != makers for label in given):
            continue
        if not any(maker in labels.mixed or maker in rows or takers[maker] != {name} for maker in makers):
            columns = tuple(maker for maker in inputs if maker in makers)
            smallest = around = ".".join(os.path.commonprefix([each.split(".")[:-1] for each in (*columns, name)]))
            while around and around not in calls:  # a list of layers never is
                around = around.rpartition(".")[0]
            call = calls.get(around, ((), {}))
            rows.add(name)
            # Only floats get noise. Without it any way may seem to fit in a larger block.
            if around == smallest or any(x.is_floating_point() for x in tensors_in(call)):
                pairs.append(Pair(columns, name, around, call))
    return pairs
