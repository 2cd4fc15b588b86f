"""torchmetrics' objects in replicas: one object for all, updated in the order of the samples.

Updates of several copies would be lost, or would have to be merged, which not every metric can do. So the replicas hold
a stand-in in a metric's place. It waits until the earlier replicas have ended their steps, and then is the metric
itself, whose state becomes that of a single process which was given the shares one after the other. After a replica has
first used a metric, its step no longer runs in parallel; this is usually at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel.batch import mapped


class MetricInTurn:
    """Stands for a metric in a replica. ``isinstance`` takes it for one.

    Args:
        metric: that it stands for.
        wait: waits for the earlier replicas.
    """

    def __init__(self, metric: Metric | MetricCollection, wait: Callable[[], None]) -> None:
        self._metric = metric
        self._wait = wait

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._metric)

    def __getattr__(self, name: str) -> Any:
        self._wait()
        value = getattr(self._metric, name)
        return self._with_arguments_here(value) if name in ("__call__", "forward", "update") else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__getattr__("__iter__")())

    def __len__(self) -> int:
        return len(self._metric)  # type: ignore[arg-type]

    def _with_arguments_here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Arguments come to the metric's device, which is the first replica's."""
        members = self._metric.values() if isinstance(self._metric, MetricCollection) else [self._metric]
        device = next(iter(members)).device

        def call(*args: Any, **kwargs: Any) -> Any:
            there = mapped((args, kwargs), lambda tensor: tensor.to(device))
            return function(*there[0], **there[1])

        return call


def in_turn(module: nn.Module, wait: Callable[[], None]) -> MetricInTurn | None:
    """The stand-in of a metric; None for other modules."""
    return MetricInTurn(module, wait) if isinstance(module, Metric | MetricCollection) else None


def metric_itself(value: Any) -> Any:
    """What a stand-in stands for. Other values are returned as they are."""
    return value._metric if type(value) is MetricInTurn else value
