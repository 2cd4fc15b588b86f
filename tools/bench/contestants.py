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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from lightning_parallel.cuts.search import partition
from lightning_parallel.gradients.swapping import swap_gradients
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout, Placement
from lightning_parallel.schedules.actions import placement
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.named import SCHEDULES
from tools.bench.layers import MakeOptimizer, intervals, loss_of, sgd
from tools.bench.rounds import in_turn

CPU = torch.device("cpu")
COMPARED = ("gpipe", "1f1b")  # the schedules with one chunk a stage that both this package and torch have
ONLY_OURS = ("vhalf", "vmin")  # torch has none
CHUNKED = ("interleaved", "zbv", *ONLY_OURS)  # those with two


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
def place(device: torch.device) -> tuple[Layout, Groups]:
    """Of this rank, one stage a rank; the groups are made once, by all ranks. Over NCCL they need the device."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    return layout, Groups(layout, device=device)


def _stage(layers: nn.Sequential, layout: Layout, batch: Tensor, places: Placement | None = None) -> Stage:
    def step() -> Tensor:
        return loss_of(layers(batch))

    parts = partition(layers, step, layout.stages, balance="layers", placement=places)
    stage = Stage(layers, parts, layout.stage, batch.device)
    stage.flow = stage.flow_of(step)
    stage.install()
    return stage


def _work(layers: nn.Sequential, batch: Tensor, microbatches: int) -> list[Microbatch]:
    def bind(part: Tensor) -> Callable[[], Tensor]:
        return lambda: loss_of(layers(part))

    parts = torch.tensor_split(batch, microbatches)
    loss = BatchLoss([len(part) for part in parts])
    return [
        Microbatch(bind(part), 1.0, loss, index=k, seed=k, ends_batch=k == microbatches - 1)
        for k, part in enumerate(parts)
    ]


class Ours(Synchronous):
    """The bare engine running a synchronous schedule."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        layout, groups = place(batch.device)
        self.is_first, self.is_last = layout.stage == 0, layout.is_last_stage
        lists = SCHEDULES[schedule](layout.stages, microbatches)
        places = placement(lists)
        stage = _stage(layers, layout, batch, places)
        self.engine = Engine(stage, layout, groups.wires(places), batch.device, loss_of=lambda loss: loss)
        self._optimizer = optimizer(stage.named_parameters().values())
        self._actions = lists[layout.stage]
        self._work = dict(enumerate(_work(layers, batch, microbatches)))

    def step(self) -> None:
        self.engine.run(self._actions, self._work, update=self._update)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class OursOnwards(Ours):
    """The same; a stage goes on to the next batch by itself."""

    def step(self) -> None:
        self.engine.run(self._actions, self._work, update=self._update, more_follow=True)

    def drain(self) -> None:
        self.engine.end_stream()


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
        layout, groups = place(CPU)
        self.is_first, self.is_last = layout.stage == 0, layout.is_last_stage
        stage = _stage(layers, layout, batch)
        self._parameters = stage.named_parameters()
        self.versions = WeightVersions(layers, self._parameters)
        weights = {layout.stage: self.versions}
        self.engine = Engine(stage, layout, groups.wires(), CPU, loss_of=lambda loss: loss, weights=weights)
        self._optimizer = optimizer(self._parameters.values())
        self._list = AsyncOneFOneB(layout.stages, layout.stage, extra_in_flight)
        self._work = _work(layers, batch, microbatches)
        self._fed = 0

    def step(self) -> None:
        work = dict(enumerate(self._work, self._fed))
        self._fed += len(work)
        self.engine.run(self._list.feed(len(work)), work, update=self._update, more_follow=True)

    def drain(self) -> None:
        self.engine.run(self._list.drain(), {}, update=self._update, more_follow=True)
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
        ranks, rank = dist.get_world_size(), dist.get_rank()
        # By rank, the chunks that torch wants there, which it calls stages.
        indices = {"interleaved": [rank, ranks + rank], "zbv": [rank, 2 * ranks - 1 - rank]}.get(schedule, [rank])
        count = ranks * len(indices)
        each = len(layers) // count
        parts = [layers[index * each : (index + 1) * each] for index in indices]
        made: list[Any] = [PipelineStage(part, index, count, CPU) for part, index in zip(parts, indices, strict=True)]
        self.is_first, self.is_last = 0 in indices, count - 1 in indices

        def loss_fn(output: Tensor, _: Tensor) -> Tensor:
            return loss_of(output)

        # Our weights of the losses, 1 / microbatches, are its scaling of the gradients.
        self._schedule: Any
        if schedule in CHUNKED:
            several = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}[schedule]
            self._schedule = several(made, microbatches, loss_fn=loss_fn)
        else:
            one = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
            self._schedule = one(made[0], microbatches, loss_fn=loss_fn)
        self._optimizer = optimizer(parameter for part in parts for parameter in part.parameters())
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
    """Seconds of synchronous steps, as all ranks see them: the longest of each."""
    times: list[float] = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        contestant.step()
        times.append(time.perf_counter() - start)
    longest = torch.tensor(times)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist() if dist.get_rank() == 0 else []


def timed_launch(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds of a step: until the host has launched all of it, and until the device has done it."""
    begin = time.perf_counter()
    step()
    launched = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return launched - begin, time.perf_counter() - begin


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
        for name in in_turn(names, turn):
            dist.barrier()
            times[name] += runs[name]()
    return times


def merge(ranks: list[Times]) -> Times:
    """What the ranks measured: of each contestant, one rank did."""
    return {name: [seconds for times in ranks for seconds in times[name]] for name in ranks[0]}
