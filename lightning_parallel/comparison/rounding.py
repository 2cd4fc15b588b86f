"""How far rounding moves the numbers of a run. Where they are less exact than float64, that is the tolerance.

One process trains the same batches again, while the output of each layer goes up or down by its last bit. It is the
last bit of the layer's own precision: under ``bf16-mixed`` some layers compute in bfloat16, others in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_parallel.comparison.differences import Difference, differences
from lightning_parallel.comparison.evidence import Evidence

_OF_FLOAT64 = 1e-9
_MARGIN = 4  # times as far as the farthest of a few trials
_STORED: Mapping[str, torch.dtype] = MappingProxyType({"bf16-true": torch.bfloat16, "16-true": torch.float16})


@contextmanager
def last_bits_changed(seed: int) -> Iterator[None]:
    """Inside, the outputs of all modules go up or down by their last bit. It draws from a generator of its own."""
    generators: dict[torch.device, torch.Generator] = {}

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value)) if type(value) is tuple else value
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        up = torch.empty_like(value, requires_grad=False).bernoulli_(0.5, generator=generators[value.device])
        return value * (1 + (2 * up - 1) * torch.finfo(value.dtype).eps)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return changed(output)

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class Limits:
    """How far a number may be from one process's, by how far changes of the last bits have moved it in trials.

    A number's own distance may be small by chance. So it counts as at least the median of those that are computed
    beside it, and as the last bit of what a ``precision`` stores. Without trials, all numbers are taken for float64.
    """

    def __init__(self, plain: Evidence, trials: Sequence[Evidence], precision: str) -> None:
        self._least = torch.finfo(_STORED.get(precision, torch.float32)).eps
        moved = [each for trial in trials for each in differences([trial], plain)]
        self._moved: dict[str, list[tuple[int, float]]] = {}
        beside: dict[tuple[int, int], list[float]] = {}
        for each in moved:
            self._moved.setdefault(each.name, []).append((each.update, each.size))
            beside.setdefault((each.update, each.order), []).append(each.size)
        self._median = {place: median(sizes) for place, sizes in beside.items()}

    def of(self, number: Difference) -> float:
        """The limit of a number. What is computed from moved numbers moves as far as these, at least."""
        if not self._moved:
            return _OF_FLOAT64
        own = [size for update, size in self._moved.get(number.name, ()) if update <= number.update]
        return _MARGIN * max(*own, self._median.get((number.update, number.order), 0.0), self._least)
