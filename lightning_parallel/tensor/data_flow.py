"""Finds, by one run of a model, which linear layer's output flows into which other one.

Every value of the run is one of three things: no activation at all (a parameter, a mask), a whole activation, or made
of the outputs of some linear layers and nothing else::

    x (whole) --+-- q --+
                +-- k --+-- softmax(q k) v --- out --- + x      out's input is made of {q, k, v}
                +-- v --+
      (whole) ----- up ----- gelu ------------ down -- + x      down's input is made of {up}

Layers whose outputs all end in one other layer's input, with no whole activation mixed in, may be columns, and that one
their row. Whether they can really be divided is tried by ``plan_search.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.interception import Interception
from lightning_parallel.private.torch import tensors_in, tree_map
from lightning_parallel.tensor.linear import is_linear

Label = frozenset[str] | None  # linear layers by name; the empty set for a whole activation; None for no activation
_WHOLE: Label = frozenset()


@dataclass(frozen=True)
class Pair:
    """Linear layers that may be divided by output features (``columns``, in the order of calls), and the one that takes
    their outputs (``row``), by name. ``call`` are the arguments with which the module around them was first called."""

    columns: tuple[str, ...]
    row: str
    call: Any = field(default=((), {}), compare=False)

    @property
    def around(self) -> str:
        """The smallest module that holds all layers of the pair."""
        return ".".join(os.path.commonprefix([name.split(".")[:-1] for name in (*self.columns, self.row)]))


def cloned(values: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, values)


class _Labels(TorchFunctionMode):
    """A mode that labels the results of torch's functions by what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: set[str] = set()  # layers whose outputs have met a whole activation
        self._labels: dict[int, Label] = {}
        self._kept: list[Tensor] = []  # ids are used again

    def of(self, values: Any) -> Label:
        labels = [self._labels.get(id(x)) for x in tensors_in(values)]
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
                self._labels[id(x)] = label
                self._kept.append(x)

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
            pair = Pair(tuple(maker for maker in inputs if maker in makers), name)
            pairs.append(replace(pair, call=calls.get(pair.around, pair.call)))  # containers are never called
            rows.add(name)
    return pairs
