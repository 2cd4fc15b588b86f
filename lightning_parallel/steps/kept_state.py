"""Finds what steps leave on modules for later that depends on how often they run: microbatches leave something else
than their batch would.

A metric over samples has the same state after two microbatches as after both as one, and a list gets as many samples.
The maximum of a mean differs, and so does the number of means in a list::

                                  two microbatches    both as one
    self.accuracy.update(logits)  3 + 2 of 8          5 of 8
    self.best.update(loss)        max(0.7, 0.9)       0.8
    self.losses.append(loss)      [0.7, 0.9]          [0.8]
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.tracing.snapshot import OF_MODULES

_LARGE = 2**20  # elements; a larger buffer is somebody's data


def left_by(module: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """The numbers in the states of metrics, in buffers, and in what is added to lists and dictionaries, by name and in
    order of size. Metrics are reset before the run: what they have seen would hide it."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.reset()
    before = {name: tree_leaves(container) for name, container in _containers(module)}
    run()
    found = {name: _numbers(tree_leaves(states)) for name, states in _states(module)}
    for name, container in _containers(module):
        leaves = {id(leaf): leaf for leaf in tree_leaves(container)}
        earlier, now = (Counter(map(id, each)) for each in (before.get(name, []), tree_leaves(container)))
        # One that was empty, or doesn't keep what it had, may be of each step.
        if earlier and earlier <= now:
            found[name] = _numbers([leaves[key] for key in (now - earlier).elements()])
    return found


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> frozenset[str]:
    """The names of what isn't the same up to rounding. ``tolerance`` is relative."""

    def same(a: Tensor, b: Tensor) -> bool:
        scale = max((float(x.nan_to_num(posinf=0, neginf=0).abs().max()) for x in (a, b) if x.numel()), default=0.0)
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)

    return frozenset(name for name in one.keys() & other.keys() if not same(one[name], other[name]))


def _states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            yield path, part.metric_state
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.numel() <= _LARGE:
                yield f"{path}.{name}".strip("."), buffer


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        for name, value in () if isinstance(part, Metric) else vars(part).items():
            if isinstance(value, list | dict | deque) and name not in OF_MODULES:
                yield f"{path}.{name}".strip("."), value


def _numbers(leaves: list[Any]) -> Tensor:
    present = [x for x in leaves if isinstance(x, int | float | Tensor) and not isinstance(x, AbsentTensor)]
    flat = [torch.as_tensor(x).detach().double().flatten().cpu() for x in present]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *flat]).sort().values
