"""A schedule run by real processes: memory that is bounded, messages that aren't lost, generators left alone."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.cuts.search import partition
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.messages.channel import Sender
from lightning_parallel.messages.ends import Ends
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.named import SCHEDULES
from lightning_parallel.timeline.recording import Timeline
from tests.pipeline import nets
from tests.pipeline.nets import BLOCKS, Net
from tests.pipeline.versions import copies_held
from tools.workers.pool import WorkerPool

CPU = torch.device("cpu")
ADAMW = {"lr": 0.05, "eps": 1e-3}  # with a small eps, gradients that are zero but for rounding become updates


def model_of(kind: str) -> Any:
    """The same on every rank."""
    torch.manual_seed(0)
    return (vars(nets) | globals())[kind]()


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


@dataclass
class Rank:
    """One stage, its engine and what it needs. Made on every rank at once."""

    kind: str
    asynchronous: bool = False
    options: dict[str, Any] = field(default_factory=lambda: dict(BLOCKS))

    def __post_init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        self.layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
        self.model = model_of(self.kind)
        self.partition = partition(self.model, lambda: self.model.step(rows(2)), self.layout.stages, **self.options)
        self.stage = Stage(self.model, self.partition, self.layout.stage, CPU)
        self.stage.install()
        self.stage.flow = self.stage.flow_of(lambda: self.model.step(rows(2)))
        self.parameters = self.stage.named_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), **ADAMW)
        self.versions = WeightVersions(self.model, self.parameters) if self.asynchronous else None
        self.engine = Engine(
            self.stage, self.layout, Groups(self.layout).wires(self.partition.placement), CPU,
            loss_of=lambda loss: loss,
            weights=self.versions and {self.layout.stage: self.versions}, timeline=Timeline(enabled=True),
        )  # fmt: skip
        self.held: list[int] = []  # activations held at each forward, its own included
        self.copies: list[int] = []  # older versions that are kept, at each forward and after each update

    def work(self, batch: Tensor, sizes: Sequence[int], first: int = 0) -> dict[int, Microbatch]:
        parts, loss = batch.split(list(sizes)), BatchLoss(sizes)
        return {
            first + k: Microbatch(
                partial(self._step, part), 1.0, loss, index=k, seed=first + k, ends_batch=k == len(sizes) - 1
            )
            for k, part in enumerate(parts)
        }

    def _step(self, part: Tensor) -> Any:
        self.held.append(self.in_flight + 1)
        if self.versions:
            self.copies.append(copies_held(self.versions))
        return self.model.step(part)

    @property
    def in_flight(self) -> int:
        """The microbatches whose forward has run here and whose backward hasn't, counted for each chunk."""
        return sum(len(chunk._in_flight) for chunk in self.engine._chunks.values())

    @property
    def ends(self) -> Ends:
        """Of the stage's first chunk."""
        return self.engine._chunks[self.stage.chunks[0]]._ends

    def update(self) -> None:
        """One asynchronous update."""
        assert self.versions is not None
        gradients = self.versions.take_gradients()

        def apply() -> None:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients.get(name)
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.versions.update(apply)
        self.copies.append(copies_held(self.versions))


# -- synchronous schedules ---------------------------------------------------------------------------------------------


class Token:
    """What a graph holds as long as it lives."""


class Probe(torch.autograd.Function):
    """Identity; a token lives as long as its node in the graph."""

    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Probe.alive.add(ctx.token)
        Probe.most = max(Probe.most, len(Probe.alive))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Probed(Net):
    """One probe a block; as many blocks as stages."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Probe.apply(super().forward(x)).tanh()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__(blocks=dist.get_world_size())

    def block(self) -> nn.Module:
        return self.Block(self.width, self.width)


def measures_memory(counts: list[int]) -> dict[tuple[str, int], tuple[int, int]]:
    """Activations held at most, by schedule and number of microbatches: as the engine counts, and as the graphs that
    are alive tell."""
    rank = Rank("Probed")
    found = {}
    for schedule, count in product(("gpipe", "1f1b"), counts):
        Probe.most = 0
        rank.held.clear()
        actions = SCHEDULES[schedule](rank.layout.stages, count)[rank.layout.stage]
        for _ in range(2):
            rank.engine.run(actions, rank.work(rows(count), [1] * count))
            assert not Probe.alive
            assert not any(isinstance(each, Arrival) for each in gc.get_objects())  # without a collection of garbage
        # The last stage's losses are the caller's, and with them the (emptied) graphs.
        found[schedule, count] = max(rank.held), max(rank.held) if rank.layout.is_last_stage else Probe.most
    return found


def test_activations_held_are_those_that_the_schedule_promises(pool: WorkerPool) -> None:
    for before_last, found in enumerate(pool.run(measures_memory, 4, [2, 6])):
        for (schedule, count), held in found.items():
            expected = {"gpipe": count, "1f1b": min(1 + before_last, count)}[schedule]  # min(p - s, m)
            assert held == (expected, expected), (schedule, count, before_last)


# -- endless schedules -------------------------------------------------------------------------------------------------


def trained_late(count: int, extra: int) -> dict[str, Any]:
    """Eight updates, and what they have held."""
    rank = Rank("Net", asynchronous=True)
    engine, layout = rank.engine, rank.layout
    actions = AsyncOneFOneB(layout.stages, layout.stage, extra)
    for first in range(0, 8 * count, count):
        work = rank.work(rows(2 * count, seed=first), [2] * count, first)
        engine.run(actions.feed(count), work, update=rank.update, endless=True)
    assert engine.run(actions.drain(), {}, update=rank.update, endless=True) == []
    engine.end_stream()
    engine.end_stream()  # nothing is left to end
    assert rank.in_flight == 0
    senders = [way.activations for way in rank.ends.out_of.values()]
    senders += [way.gradients for way in rank.ends.into.values()]
    unconfirmed = max(len(sender._unconfirmed) for sender in senders)  # type: ignore[union-attr]
    return {"held": max(rank.held), "copies": max(rank.copies), "unconfirmed": unconfirmed}


@pytest.mark.parametrize(("stages", "count", "extra"), [(4, 2, 0), (3, 1, 1)])
def test_asynchronous_memory_is_bounded(pool: WorkerPool, stages: int, count: int, extra: int) -> None:
    ranks = pool.run(trained_late, stages, count, extra)
    for stage in range(stages):
        rank = ranks[stages - 1 - stage]
        ahead = (stages - 1 - stage) * (1 + extra)
        assert rank["held"] == ahead + 1  # p - s
        assert rank["copies"] == -(-ahead // count)  # one for each update in flight
        assert rank["unconfirmed"] <= ahead + 3


def runs_ahead(kind: str) -> tuple[int, int]:
    """Messages that the first stage holds although no gradient ever confirms one."""
    rank = Rank(kind, asynchronous=True, options={**BLOCKS, "balance": getattr(nets, kind).balance(2)})
    actions = AsyncOneFOneB(2, rank.layout.stage)
    most = 0
    for k in range(30):
        rank.engine.run(actions.feed(1), rank.work(rows(2), [2], k), update=rank.update, endless=True)
        for way in rank.ends.out_of.values():
            assert isinstance(way.activations, Sender)
            most = max(most, len(way.activations._unconfirmed))
    rank.engine.run(actions.drain(), {}, update=rank.update, endless=True)
    rank.engine.end_stream()
    assert rank.versions is not None
    return most, rank.versions.updates


def test_a_stage_that_gets_no_gradients_does_not_run_away(pool: WorkerPool) -> None:
    (_, last), (unconfirmed, first) = pool.run(runs_ahead, 2, "FrozenFirst")
    assert last == first == 30 and unconfirmed <= 2


# -- evaluation, generators, ends --------------------------------------------------------------------------------------


class Slow(Net):
    """A model whose first stage is slow in the backward, and whose last stage is slow in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_hook(lambda gradient: time.sleep(0.05))

    def step(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if not self.training:
            time.sleep(0.05)
        return self.head(x).square().mean()


def leaves_at_once(how: str) -> list[float]:
    """A rank that is done closes its connections, whatever the others still have to do."""
    rank = Rank("Slow", asynchronous=how == "asynchronous")
    results: list[Any] = []
    if how == "evaluation":
        rank.model.eval()
        for i in range(4):
            with torch.no_grad():
                results.append(rank.engine.evaluate(partial(rank.model.step, rows(2)), i))
    elif how == "asynchronous":
        actions = AsyncOneFOneB(rank.layout.stages, rank.layout.stage)
        for k in range(4):
            results += rank.engine.run(actions.feed(1), rank.work(rows(2), [2], k), update=rank.update, endless=True)
        rank.engine.run(actions.drain(), {}, update=rank.update, endless=True)
        rank.engine.end_stream()
    else:
        actions_ = SCHEDULES[how](rank.layout.stages, 4)[rank.layout.stage]
        results += rank.engine.run(actions_, rank.work(rows(8), [2] * 4))
    values = [result.item() for result in results if result is not None]
    del rank, results
    gc.collect()
    dist.destroy_process_group()
    return values


@pytest.mark.parametrize("how", ["1f1b", "asynchronous", "evaluation"])
def test_a_process_that_ends_early_takes_no_message_with_it(pool: WorkerPool, how: str) -> None:
    assert [len(values) for values in pool.run(leaves_at_once, 3, how)] == [4, 0, 0]
