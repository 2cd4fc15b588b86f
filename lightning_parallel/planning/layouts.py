"""The layouts that there are for some devices and a batch, before anything is known of the module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import Schedule
from lightning_parallel.schedules.named import SCHEDULES, asynchronous
from lightning_parallel.schedules.simulate import Order

_CHUNKS = MappingProxyType({"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "vhalf": 2, "vmin": 2, "async": 1})
# Those whose replicas may be fully sharded, for which backwards are whole; the first two become pipelines of one stage.
_SHARDED = ("ddp", "tensor_parallel", "pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved")
_A_STAGE, _OF_MANY = (1, 2, 4, 8), (2, 8)  # microbatches that are tried, for each stage; and as many as can be
_MANY = 8  # stages: lists of more, and of many microbatches, take seconds to make
_MOST = 256  # microbatches, unless there are more stages; also layers, where they aren't known
_A_CHUNK = 2  # layers: with fewer, cuts are uneven, or lie in layers, which takes many dry runs to find
_FEW = 16  # chunks, which are tried of any module
_NODE = 8  # devices whose links are fast enough for tensor parallelism
Balance = tuple[int, ...] | Literal["operations"]


@dataclass(frozen=True)
class Choice:
    """A layout with its settings.

    Attributes:
        strategy: its name, as ``Trainer(strategy=...)`` and the recipes take it.
        stages, data, tensor: the sizes of the axes.
        microbatches: of a replica's batch.
        recompute: ``activation_checkpointing``.
        sharded: ``data_parallel_kind="fully_shard"`` of a pipeline.
        balance: the numbers of layers of chunks, or what is to be equal; None for the default.
    """

    strategy: str
    stages: int = 1
    data: int = 1
    tensor: int = 1
    microbatches: int = 1
    recompute: bool = False
    sharded: bool = False
    balance: Balance | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the strategy."""
        if self.strategy == "tensor_parallel":
            return {"tensor_parallel": self.tensor, "data_parallel": self.data}
        if not self.is_pipeline:
            return {}
        options: dict[str, Any] = {
            "stages": self.stages,
            "data_parallel": self.data,
            "microbatches": self.microbatches,
        }
        options |= {"tensor_parallel": self.tensor} if self.tensor > 1 else {}
        options |= {"activation_checkpointing": True} if self.recompute else {}
        options |= {"data_parallel_kind": "fully_shard"} if self.sharded else {}
        if self.balance is not None:
            options["balance"] = list(self.balance) if isinstance(self.balance, tuple) else self.balance
        return options

    @property
    def ranks(self) -> int:
        return self.stages * self.data * self.tensor

    @property
    def is_pipeline(self) -> bool:
        return self.strategy.startswith("pipeline")

    @property
    def is_late(self) -> bool:
        """Are gradients late, so that it isn't the training of one process?"""
        return self.strategy == "pipeline_async"

    @property
    def placement(self) -> Placement:
        """The stage of each chunk."""
        if not self.is_pipeline:
            return (0,)
        return tuple(range(self.stages)) if self.is_late else self.order().places

    def chunks_of(self, stage: int) -> list[int]:
        """The chunks that a stage runs."""
        return [chunk for chunk, place in enumerate(self.placement) if place == stage]

    def order(self, updates: int = 1) -> Order:
        """The lists of a pipeline's stages. Those of the asynchronous one are of several updates, with the drain."""
        return _order(self.strategy.removeprefix("pipeline_"), self.stages, self.microbatches, updates)

    def __str__(self) -> str:
        replicas = "fully sharded replicas" if self.sharded else "replicas"
        sizes = {"stages": self.stages, replicas: self.data, "tensor ranks": self.tensor}
        several = [f"{size} {name}" for name, size in sizes.items() if size > 1]
        several += ["checkpointing"] if self.recompute else []
        return ", ".join([self.strategy, *several])


@cache
def _order(name: str, stages: int, microbatches: int, updates: int) -> Order:
    if name == "async":
        return Order(asynchronous(stages, microbatches, updates))
    return Order(SCHEDULES[name](stages, microbatches))


def tensor_sizes(devices: int) -> list[int]:
    """The numbers of ranks of a tensor group that are planned: they divide the devices, and stay within a node."""
    return [size for size in range(1, min(devices, _NODE) + 1) if devices % size == 0]


def choices(devices: int, samples: int, tensor: int = 1, layers: int = _MOST) -> Iterator[Choice]:
    """All layouts that use all devices and have so many ranks in a tensor group, without activation checkpointing.

    Args:
        samples: of a batch of all replicas, which have equal shares of it.
        layers: of the module, of which a chunk has at least two. But some chunks are tried of any module, whose layers
            may be cut into their parts.
    """
    if devices == 1:
        yield Choice("single")
        return
    left = devices // tensor  # devices, for the other axes
    if samples % left == 0 and tensor == 1:
        yield Choice("ddp", data=devices)
        yield Choice("fully_sharded", data=devices)
    elif samples % left == 0:
        yield Choice("tensor_parallel", data=left, tensor=tensor)
    most = max(layers // _A_CHUNK, _FEW)
    for stages in range(2, min(left, most) + 1):
        replicas = left // stages
        if left % stages or samples % replicas:
            continue
        tried = _A_STAGE if stages <= _MANY else _OF_MANY
        lists: list[Schedule] = []  # with few stages or microbatches some schedules have the same
        for schedule in (name for name, chunks in _CHUNKS.items() if chunks * stages <= most):
            finest = min(samples // replicas, max(stages, _MOST))
            counts = {finest, *(min(each * stages, finest) for each in tried)}
            for count in sorted(counts):
                choice = Choice(f"pipeline_{schedule}", stages, replicas, tensor, microbatches=count)
                own = choice.order().schedule
                if choice.is_late or own not in lists:
                    lists.append(own)
                    yield choice


def thriftier(choice: Choice, samples: int) -> Iterator[Choice]:
    """Variants of a layout that hold less, in the order in which they are tried: with fully sharded replicas, with
    activation checkpointing, with both.

    Args:
        samples: of a batch of all replicas.
    """
    found = [choice]
    if not choice.is_pipeline:  # a pipeline of one stage has microbatches, and can do both
        counts = sorted({min(each, samples // choice.data) for each in _A_STAGE})
        found = [replace(choice, strategy="pipeline_1f1b", microbatches=count) for count in counts]
    sharded = [replace(each, sharded=True) for each in found if choice.data > 1 and choice.strategy in _SHARDED]
    yield from sharded
    if choice.is_pipeline:
        yield replace(choice, recompute=True)
    yield from (replace(each, recompute=True) for each in sharded)
