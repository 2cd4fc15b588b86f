"""What runs batches without Lightning: this package's engine, torch.distributed.pipelining, and one process. Loops by
hand are in ``by_hand.py``.

A contestant is made on every rank, one stage a rank. The layers given to it are the whole model, of which it keeps
its stage; every stage has the same number of layers. Each runs one batch a :meth:`~Contestant.step`, split into
microbatches along dimension 0, optimizer step included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_parallel.gradients.swapping import swap_gradients
from lightning_parallel.groups import Groups
from lightning_parallel.layout import Layout
from lightning_parallel.pipeline.async_schedule import AsyncOneFOneB
from lightning_parallel.pipeline.engine import Engine, Microbatch
from lightning_parallel.pipeline.partitioning import partition
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from recipes.bench.layers import MakeOptimizer, intervals, loss_of, sgd

CPU = torch.device("cpu")
COMPARED = ("gpipe", "1f1b")  # the schedules that both this package and torch have


class Contestant(Protocol):
    """Runs batches.

    Attributes:
        is_first, is_last: which stage this rank has.
    """

    is_first: bool
    is_last: bool

    def step(self) -> None:
        """Run one batch on this rank's stage."""
        ...

    def drain(self) -> None:
        """Run what is still owed of it, so that other contestants can run."""
        ...


class Synchronous:
    """A contestant whose step leaves nothing owed."""

    def drain(self) -> None:
        pass


@cache
def place() -> tuple[Layout, Groups]:
    """Of this rank, one stage a rank; the groups are made once, by all ranks."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    return layout, Groups(layout)


def _stage(layers: nn.Sequential, layout: Layout, batch: Tensor) -> Stage:
    def step() -> Tensor:
        return loss_of(layers(batch))

    stage = Stage(layers, partition(layers, step, layout.stages, balance="layers"), layout.stage, CPU)
    stage.flow = stage.survey(step)
    stage.install()
    return stage


def _work(layers: nn.Sequential, batch: Tensor, microbatches: int) -> list[Microbatch]:
    def bind(part: Tensor) -> Callable[[], Tensor]:
        return lambda: loss_of(layers(part))

    parts = torch.tensor_split(batch, microbatches)
    return [
        Microbatch(bind(part), 1 / microbatches, place=k, seed=k, begins_update=k == 0) for k, part in enumerate(parts)
    ]


class Ours(Synchronous):
    """The bare engine running a synchronous schedule."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        layout, groups = place()
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
        stage = _stage(layers, layout, batch)
        self.engine = Engine(stage, layout, groups.links, CPU, loss_of=lambda loss: loss)
        self._optimizer = optimizer(stage.named_parameters().values())
        self._actions = SCHEDULES[schedule](layout.stages, microbatches)[layout.stage]
        self._work = dict(enumerate(_work(layers, batch, microbatches)))

    def step(self) -> None:
        self.engine.run(self._actions, self._work, update=self._update)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class OursAsync:
    """The bare engine on the endless list, with weight versions."""

    def __init__(
        self,
        layers: nn.Sequential,
        batch: Tensor,
        microbatches: int,
        extra_in_flight: int = 0,
        optimizer: MakeOptimizer = sgd,
    ) -> None:
        layout, groups = place()
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
        stage = _stage(layers, layout, batch)
        self._parameters = stage.named_parameters()
        self.versions = WeightVersions(layers, self._parameters)
        self.engine = Engine(stage, layout, groups.links, CPU, loss_of=lambda loss: loss, weights=self.versions)
        self._optimizer = optimizer(self._parameters.values())
        self._list = AsyncOneFOneB(layout.stages, layout.stage, extra_in_flight)
        self._work = _work(layers, batch, microbatches)
        self._fed = 0

    def step(self) -> None:
        work = dict(enumerate(self._work, self._fed))
        self._fed += len(work)
        self.engine.run(self._list.feed(len(work)), work, update=self._update, endless=True)

    def drain(self) -> None:
        self.engine.run(self._list.drain(), {}, update=self._update, endless=True)
        self.engine.end_stream()

    def _update(self) -> None:
        gradients = self.versions.take_gradients()

        def apply() -> None:
            swap_gradients(self._parameters, gradients)
            self._optimizer.step()
            swap_gradients(self._parameters, {})

        self.versions.update(apply)


class Torch(Synchronous):
    """A schedule of torch.distributed.pipelining on stages made by hand."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        stages, index = dist.get_world_size(), dist.get_rank()
        self.is_first, self.is_last = index == 0, index == stages - 1
        each = len(layers) // stages
        module = layers[index * each : (index + 1) * each]
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        # Our weights of the losses, 1 / microbatches, are its scaling of the gradients.
        self._schedule = kind(
            PipelineStage(module, index, stages, CPU), microbatches, loss_fn=lambda output, _: loss_of(output)
        )
        self._optimizer = optimizer(module.parameters())
        self._inputs = (batch,) if self.is_first else ()
        self._target = batch if self.is_last else None

    def step(self) -> None:
        losses: list[Tensor] | None = [] if self.is_last else None
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()


class OneProcess(Synchronous):
    """No parallelism: the whole model on rank 0, microbatches one after the other; other ranks do nothing."""

    def __init__(self, layers: nn.Sequential, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd) -> None:
        self.is_first = self.is_last = dist.get_rank() == 0
        self._layers = layers
        self._parts = torch.tensor_split(batch, microbatches)
        self._optimizer = optimizer(layers.parameters())

    def step(self) -> None:
        if not self.is_first:
            return
        for part in self._parts:
            (loss_of(self._layers(part)) / len(self._parts)).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


Times = dict[str, list[float]]  # seconds of each batch, by contestant


def timed_steps(contestant: Contestant, count: int) -> list[float]:
    """Seconds of synchronous steps, on the first stage, which begins each and ends it; empty elsewhere."""
    times: list[float] = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        contestant.step()
        times.append(time.perf_counter() - start)
    return times if contestant.is_first else []


def timed_stream(contestant: Contestant, count: int, skip: int) -> list[float]:
    """Seconds between the ends of batches on the last stage, without the first ``skip``; empty elsewhere."""
    dist.barrier()
    ends: list[float] = []
    for _ in range(count):
        contestant.step()
        ends.append(time.perf_counter())
    contestant.drain()
    return intervals(ends)[skip:] if contestant.is_last else []


def alternate(runs: Mapping[str, Callable[[], list[float]]], rounds: int) -> Times:
    """Let the contestants run in turn, every second round in reverse, so that noise and drift hit all alike."""
    names = list(runs)
    times: Times = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            dist.barrier()
            times[name] += runs[name]()
    return times


def merge(ranks: list[Times]) -> Times:
    """What the ranks measured: of each contestant, one rank did."""
    return {name: [seconds for times in ranks for seconds in times[name]] for name in ranks[0]}
