"""An optimizer's options, learning rates among them, as they were when an update's batch came.

An asynchronous stage makes update u when schedulers have gone on already: by as many batches as it lags behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Options = list[dict[str, Any]]  # one dict a parameter group


def options_of(optimizer: Optimizer, factor: float = 1.0) -> Options:
    """A copy of every parameter group's, with ``factor`` on the learning rate."""
    groups = [
        {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return [{**group, "lr": group["lr"] * factor} if factor != 1 else group for group in groups]


@contextmanager
def with_options(optimizer: Optimizer, options: Options) -> Iterator[None]:
    """The optimizer with options as they were; afterwards as they are."""
    # The objects themselves: a scheduler changes a rate that is a tensor in place.
    current = [
        {key: group[key] for key in values} for group, values in zip(optimizer.param_groups, options, strict=True)
    ]
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, current, strict=True):
            group.update(values)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
