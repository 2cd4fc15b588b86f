"""Makes torchmetrics gather over the data axis while a Trainer runs.

By default they gather over all ranks. But tensor ranks count the same samples again, and all stages except the last
count none. Their ``process_group`` would do, but a module that refers to a group can be neither copied nor pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

_Gather = Callable[..., list[Tensor]]


def gather_within(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Make a module's metrics gather over the ranks that see different batches. Metrics that the user gave a group keep
    it. Returns a function that undoes it."""
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
    for metric in metrics:
        metric.dist_sync_fn = _Within(group, _before(metric.dist_sync_fn))

    def put_back() -> None:
        for metric in metrics:
            metric.dist_sync_fn = _before(metric.dist_sync_fn)

    return put_back


class _Within:
    """Gathers within a group. A copied metric gathers there too; a pickled one gets back what it had before."""

    __slots__ = ("before", "group")

    def __init__(self, group: dist.ProcessGroup, before: _Gather | None) -> None:
        self.group, self.before = group, before

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return (self.before or gather_all_tensors)(tensor, group=self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Within:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _before, (self.before,)


def _before(gather: Any) -> _Gather | None:
    """What a metric gathered with before the Trainer."""
    found: _Gather | None = gather.before if isinstance(gather, _Within) else gather
    return found
