"""An optimizer's options, such as learning rates, as they were at an earlier batch.

An asynchronous stage makes update u when schedulers have already gone on, by as many batches as the stage lags behind::

    batch fed         0     1     2     3
    scheduler sets    lr0   lr1   lr2   lr3
    first stage's                 update 0, with lr0

Some optimizers write to their parameter groups themselves: schedule-free ones count their steps there. What an
optimizer writes is its state, not an option, and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.values import same_value

Options = list[dict[str, Any]]  # a dictionary for each parameter group


def options_of(optimizer: Optimizer, factor: float = 1.0) -> Options:
    """A copy of an optimizer's present options, the learning rate multiplied by ``factor``."""
    groups = [
        {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return [{**group, "lr": group["lr"] * factor} if factor != 1 else group for group in groups]


@contextmanager
def restored(optimizer: Optimizer, options: Options, written: set[str]) -> Iterator[None]:
    """Inside, the optimizer has these options. Afterwards it has its present ones again, except what it wrote itself.
    ``written`` are the keys that it is known to write to; it is added to."""
    groups = optimizer.param_groups
    given = [{k: v for k, v in values.items() if k not in written} for values in options]
    # The objects themselves: a scheduler changes a rate that is a tensor in place.
    current = [{key: group[key] for key in values} for group, values in zip(groups, given, strict=True)]
    known = set().union(*groups)
    for group, values in zip(groups, given, strict=True):
        group.update({key: _copied(value) for key, value in values.items()})
    try:
        yield
    finally:
        written |= set().union(*groups) - known  # made in the first step, as a count
        for group, values, before in zip(groups, given, current, strict=True):
            written |= {key for key, value in values.items() if not same_value(group[key], value)}
            group.update({key: value for key, value in before.items() if key not in written})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
