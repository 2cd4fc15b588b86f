"""A schedule run by real processes: the gradients of the whole batch, messages that match, memory that is bounded."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.channel import Sender
from lightning_parallel.messages.ends import Ends
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.plan.partition import Partition
from lightning_parallel.plan.search import partition
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import Forward, Step
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.generators import SCHEDULES
from lightning_parallel.timeline.recording import Timeline
from tests.pipeline import nets
from tests.pipeline.nets import BLOCKS, Net
from tests.pipeline.versions import copies_held, version
from tests.pool import WorkerPool
from tests.thorough import thorough

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
    asynchronous: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: dict(BLOCKS))
    recompute: bool = False

    def __post_init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        self.layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
        self.model = model_of(self.kind)
        self.partition = partition(self.model, lambda: self.model.step(rows(2)), self.layout.stages, **self.options)
        self.stage = Stage(self.model, self.partition, self.layout.stage, CPU)
        self.stage.install(self.recompute)
        self.stage.flow = self.stage.flow_of(lambda: self.model.step(rows(2)))
        self.parameters = self.stage.named_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), **ADAMW)
        self.versions = (
            WeightVersions(self.model, self.parameters, self.asynchronous) if self.asynchronous else None  # type: ignore[arg-type]
        )
        self.engine = Engine(
            self.stage, self.layout, Groups(self.layout).links(self.partition.placement), CPU,
            loss_of=lambda loss: loss,
            weights=self.versions, timeline=Timeline(enabled=True),
        )  # fmt: skip
        self.held: list[int] = []  # activations held at each forward, its own included
        self.used: list[int] = []  # version of the weights of each forward
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
        self.held.append(self.engine.activations_held + 1)
        if self.versions:
            self.used.append(self.versions.updates)
            self.copies.append(copies_held(self.versions))
        return self.model.step(part)

    @property
    def ends(self) -> Ends:
        """Of the stage's first chunk."""
        return self.engine._chunks[self.stage.chunks[0]]._ends

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return found

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

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# -- synchronous schedules ---------------------------------------------------------------------------------------------

# Microbatch sizes of the batches of one run: uneven, changing in number and size, fewer than stages.
BATCHES = [[3, 3, 2, 2, 2], [3, 3, 2, 2, 2], [4, 4, 3], [1], [2, 2], [1, 1, 1, 1, 1, 1, 1], [5, 5]]
# What crosses the cuts of others is pinned without processes, in test_stage.py.
NETS = ["Mixed", "Tuples", "FrozenFirst", "UNet"]


def synchronous(kind: str, schedule: str, batches: list[list[int]], options: dict[str, Any]) -> list[Any]:
    """For each batch: losses, gradients, activations held at most."""
    rank = Rank(kind, options=options)
    results = []
    for seed, sizes in enumerate(batches):
        actions = SCHEDULES[schedule](rank.layout.stages, len(sizes))[rank.layout.stage]
        steps: list[int] = []
        losses = rank.engine.run(
            actions, rank.work(rows(sum(sizes), seed), sizes), update=lambda steps=steps: steps.append(1)
        )
        assert len(steps) == 1 and rank.engine.activations_held == 0
        results.append(([loss.item() for loss in losses], rank.gradients(), max(rank.held)))
        rank.held.clear()
    buffers = {name: b.detach().clone() for name, b in rank.stage.named_buffers().items()}
    return [results, buffers]


def joined(gradients: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over the ranks; of a parameter on several stages, the sum."""
    total: dict[str, Tensor] = {}
    for found in gradients:
        for name, gradient in found.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def whole_batch(model: Any, sizes: list[int], seed: int, *, split: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of one process: of the undivided batch, or of a loop over its microbatches."""
    batch = rows(sum(sizes), seed)
    losses, gradients = [], {}
    for part in batch.split(sizes) if split else [batch]:
        model.zero_grad()  # summed here: autograd may have one memory for two gradients, and add to both
        loss = model.step(part) * (len(part) / len(batch))
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradients[name] = p.grad + gradients.get(name, 0.0)
    return losses, gradients


@pytest.mark.parametrize("stages", [3, *thorough(2, 4)])
@pytest.mark.parametrize("kind", NETS)
def test_gradients_equal_those_of_the_whole_batch(pool: WorkerPool, kind: str, stages: int) -> None:
    options = {**BLOCKS, "balance": getattr(nets, kind).balance(stages)}
    schedules = ["naive", "gpipe", "1f1b"] if kind == "Mixed" else ["1f1b"]
    for schedule in schedules:
        ranks = pool.run(synchronous, stages, kind, schedule, BATCHES, options)
        with double():
            model = model_of(kind)
            for i, sizes in enumerate(BATCHES):
                (loss,), expected = whole_batch(model, sizes, i, split=False)
                losses = ranks[0][0][i][0]  # the last stage is on rank 0
                assert all(not rank[0][i][0] for rank in ranks[1:])
                mean = sum(one * size for one, size in zip(losses, sizes, strict=True)) / sum(sizes)
                assert mean == pytest.approx(loss, rel=0, abs=1e-12), (schedule, i)
                found = joined([rank[0][i][1] for rank in ranks])
                for name in found.keys() - expected.keys():
                    assert not found.pop(name).any(), name
                assert_equal(found, expected)


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
    for schedule, count in product(("naive", "gpipe", "1f1b"), counts):
        Probe.most = 0
        rank.held.clear()
        actions = SCHEDULES[schedule](rank.layout.stages, count)[rank.layout.stage]
        for _ in range(2):
            rank.engine.run(actions, rank.work(rows(count), [1] * count))
            assert not Probe.alive
        # The last stage's losses are the caller's, and with them the (emptied) graphs.
        found[schedule, count] = max(rank.held), max(rank.held) if rank.layout.is_last_stage else Probe.most
    return found


def test_activations_held_are_those_that_the_schedule_promises(pool: WorkerPool) -> None:
    for before_last, found in enumerate(pool.run(measures_memory, 4, [1, 2, 6])):
        for (schedule, count), held in found.items():
            expected = {"naive": 1, "gpipe": count, "1f1b": min(1 + before_last, count)}[schedule]  # min(p - s, m)
            assert held == (expected, expected), (schedule, count, before_last)


# -- endless schedules -------------------------------------------------------------------------------------------------


def fed(stages: int, stage: int, phases: list[list[int]], extra: int) -> list[list[Any]]:
    """The actions of a stage, phase by phase; a phase is drained at its end."""
    actions = AsyncOneFOneB(stages, stage, extra)
    return [[*(a for count in phase for a in actions.feed(count)), *actions.drain()] for phase in phases]


def asynchronous(
    kind: str, weights: str, phases: list[list[int]], extra: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Phases of endless training, each drained and followed by an evaluation; the second by two."""
    rank = Rank(kind, asynchronous=weights, options=options)
    engine, layout = rank.engine, rank.layout
    actions = AsyncOneFOneB(layout.stages, layout.stage, extra)
    losses: list[float] = []
    evaluated: list[float] = []
    first = 0
    for number, phase in enumerate(phases):
        for count in phase:
            batch = rows(2 * count, seed=first)
            outputs = engine.run(
                actions.feed(count), rank.work(batch, [2] * count, first), update=rank.update, endless=True
            )
            losses += [loss.item() for loss in outputs]
            first += count
        assert engine.run(actions.drain(), {}, update=rank.update, endless=True) == []
        engine.end_stream()
        engine.end_stream()  # nothing is left to end
        assert engine.activations_held == 0
        assert rank.versions is not None
        rank.versions.refresh()
        with torch.inference_mode():
            for i in range(4 * min(number, 2)):
                output = engine.evaluate(partial(rank.model.step, rows(1 + i)), i)
                assert (output is not None) == layout.is_last_stage
                evaluated += [output.item()] if output is not None else []
    kinds = {span.kind for span in engine._timeline.spans}
    assert {"forward", "backward", "step"} <= kinds
    unconfirmed = max(
        len(sender._unconfirmed)  # type: ignore[union-attr]
        for sender in (rank.ends.activations_out, rank.ends.gradients_out)
        if sender is not None
    )
    return {
        "weights": rank.state(), "losses": losses, "evaluated": evaluated, "held": max(rank.held), "used": rank.used,
        "copies": max(rank.copies), "unconfirmed": unconfirmed, "updates": rank.versions.updates,
    }  # fmt: skip


@dataclass
class Reference:
    """Delayed gradients in one process: a plain loop over microbatches and stages, with every version kept."""

    model: Any
    parts: Partition

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self.names = [[n for n in named if s in self.parts.owners[n]] for s in range(self.parts.stages)]
        self.masters = [{n: named[n].detach().clone().requires_grad_() for n in names} for names in self.names]
        self.optimizers = [torch.optim.AdamW(m.values(), **ADAMW) for m in self.masters]
        self.history = [[self._copy(m)] for m in self.masters]

    @staticmethod
    def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: w.detach().clone() for name, w in weights.items()}

    def microbatch(self, part: Tensor, weight: float, versions: Sequence[int]) -> float:
        """Forward and backward with each stage's weights at its version; gradients gather in the masters."""
        for stage, used in enumerate(versions):
            for name, value in self.history[stage][used].items():
                self.model.get_parameter(name).data = value.clone()
        self.model.zero_grad()
        loss = self.model.step(part)
        (loss * weight).backward()
        for master in self.masters:
            for name, w in master.items():
                gradient = self.model.get_parameter(name).grad
                if gradient is not None:
                    w.grad = gradient.clone() if w.grad is None else w.grad + gradient
        return loss.item()

    def update(self) -> None:
        for stage, optimizer in enumerate(self.optimizers):
            optimizer.step()
            optimizer.zero_grad()
            self.history[stage].append(self._copy(self.masters[stage]))

    def current(self) -> Any:
        model = copy.deepcopy(self.model)
        for stage in self.history:
            for name, value in stage[-1].items():
                model.get_parameter(name).data = value
        return model


def versions_used(stages: int, stage: int, phases: list[list[int]], extra: int) -> list[int]:
    """By microbatch: how many steps the stage has done when its forward runs."""
    used, steps = [], 0
    for action in (a for phase in fed(stages, stage, phases, extra) for a in phase):
        if isinstance(action, Forward):
            used.append(steps)
        steps += isinstance(action, Step)
    return used


PHASES = [[1] * 7, [1], [1, 1, 1], [1] * 5]


@pytest.mark.parametrize(
    ("kind", "stages", "phases", "extra"),
    [
        ("Mixed", 4, [[3] * 4, [2], [2, 3, 1, 4]], 0),  # several microbatches an update, in changing numbers
        ("Mixed", 3, PHASES, 1),
        ("UNet", 3, PHASES, 0),
    ],
)
def test_asynchronous_training_equals_delayed_gradients(
    pool: WorkerPool, kind: str, stages: int, phases: list[list[int]], extra: int
) -> None:
    options = {**BLOCKS, "balance": "layers"}
    ranks = pool.run(asynchronous, stages, kind, "stash", phases, extra, options)
    used = [versions_used(stages, stage, phases, extra) for stage in range(stages)]
    with double():
        model = model_of(kind)
        reference = Reference(model, partition(model, lambda: model.step(rows(2)), stages, **options))
        losses: list[float] = []
        evaluated: list[float] = []
        for number, phase in enumerate(phases):
            for count in phase:
                for part in rows(2 * count, seed=len(losses)).split(2):
                    versions = [used[stage][len(losses)] for stage in range(stages)]
                    losses.append(reference.microbatch(part, 1 / count, versions))
                reference.update()
            evaluated += [reference.current().step(rows(1 + i)).item() for i in range(4 * min(number, 2))]
    for stage in range(stages):
        rank = ranks[stages - 1 - stage]
        assert rank["used"] == used[stage]
        assert rank["updates"] == sum(len(phase) for phase in phases)
        assert_equal(rank["weights"], reference.history[stage][-1])
    assert ranks[0]["losses"] == pytest.approx(losses, rel=0, abs=1e-12)
    assert ranks[0]["evaluated"] == pytest.approx(evaluated, rel=0, abs=1e-12)


@pytest.mark.parametrize(("stages", "count", "extra"), [(4, 1, 0), (4, 2, 0), (3, 1, 1)])
def test_asynchronous_memory_and_versions_are_bounded(pool: WorkerPool, stages: int, count: int, extra: int) -> None:
    ranks = pool.run(asynchronous, stages, "Net", "stash", [[count] * 20], extra, BLOCKS)
    for stage in range(stages):
        rank = ranks[stages - 1 - stage]
        ahead = (stages - 1 - stage) * (1 + extra)
        assert rank["held"] == ahead + 1  # p - s
        assert rank["used"] == [version(stages, stage, count, k, extra) for k in range(20 * count)]
        assert rank["copies"] == -(-ahead // count)  # one for each update in flight
        assert rank["unconfirmed"] <= ahead + 3


def runs_ahead(kind: str) -> tuple[int, int]:
    """Messages that the first stage holds although no gradient ever confirms one."""
    rank = Rank(kind, asynchronous="stash", options={**BLOCKS, "balance": getattr(nets, kind).balance(2)})
    actions = AsyncOneFOneB(2, rank.layout.stage)
    most = 0
    for k in range(30):
        rank.engine.run(actions.feed(1), rank.work(rows(2), [2], k), update=rank.update, endless=True)
        if isinstance(rank.ends.activations_out, Sender):
            most = max(most, len(rank.ends.activations_out._unconfirmed))
    rank.engine.run(actions.drain(), {}, update=rank.update, endless=True)
    rank.engine.end_stream()
    assert rank.versions is not None
    return most, rank.versions.updates


def test_a_stage_that_gets_no_gradients_does_not_run_away(pool: WorkerPool) -> None:
    (_, last), (unconfirmed, first) = pool.run(runs_ahead, 2, "FrozenFirst")
    assert last == first == 30 and unconfirmed <= 2


# -- evaluation, generators, ends --------------------------------------------------------------------------------------


def draws_everywhere() -> bool:
    """Forwards, backwards and updates draw, each stage as many as it likes: are the next numbers the usual ones?"""
    rank = Rank("Net", asynchronous="stash")
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    for parameter in rank.parameters.values():
        parameter.register_hook(lambda gradient: gradient + torch.rand(rank.layout.stage + 1).sum())
    step, update = rank.model.step, rank.update

    def drawing_step(part: Tensor) -> Any:
        return step(part + torch.rand(()))

    def drawing_update() -> None:
        torch.rand(rank.layout.stage + 1)
        update()

    rank.model.step = drawing_step
    actions = AsyncOneFOneB(rank.layout.stages, rank.layout.stage)
    rank.engine.run(actions.feed(3), rank.work(rows(6), [2] * 3), update=drawing_update, endless=True)
    unmoved = torch.equal(torch.get_rng_state(), expected)
    rank.engine.run(actions.drain(), {}, update=drawing_update, endless=True)
    rank.engine.end_stream()
    rank.model.step = step
    return unmoved and torch.equal(torch.get_rng_state(), expected)


def test_what_a_run_draws_leaves_the_generator_of_the_data_alone(pool: WorkerPool) -> None:
    assert pool.run(draws_everywhere, 3) == [True] * 3


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
    rank = Rank("Slow", asynchronous="stash" if how == "asynchronous" else None)
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


@pytest.mark.parametrize("how", ["naive", "gpipe", "1f1b", "asynchronous", "evaluation"])
def test_a_process_that_ends_early_takes_no_message_with_it(pool: WorkerPool, how: str) -> None:
    assert [len(values) for values in pool.run(leaves_at_once, 3, how)] == [4, 0, 0]


@pytest.mark.parametrize("kind", ["FrozenFirst", "Mixed"])
def test_training_uses_no_memory_of_inference_mode(pool: WorkerPool, kind: str) -> None:
    found = joined(pool.run(trains_after_evaluations, 2, kind))
    with double():
        expected = whole_batch(model_of(kind), [4], 0, split=False)[1]
    assert_equal(found, {name: 2 * gradient for name, gradient in expected.items()})


def trains_after_evaluations(kind: str) -> dict[str, Tensor]:
    """Two batches, evaluations in inference mode before and between, messages of one shape."""
    rank = Rank(kind, options={**BLOCKS, "balance": getattr(nets, kind).balance(2)})
    batch = rows(4)
    for _ in range(2):
        with torch.inference_mode():
            rank.engine.evaluate(partial(rank.model.step, batch))
        rank.engine.run(SCHEDULES["naive"](2, 1)[rank.layout.stage], rank.work(batch, [4]))
    return rank.gradients()


def test_after_a_wait_nothing_is_made_that_could_be_made_before(pool: WorkerPool) -> None:
    last, first = pool.run(prepares_ahead, 2)
    # Of the second batch on, when formats are known. The last microbatch has no next to post a receive for.
    assert last == ["memory", "wait", "post"] * 3 + ["wait"]
    assert first == ["memory", "wait", "post"] * 3 + ["wait"]


def prepares_ahead() -> list[str]:
    """What the receivers do, of activations on the last stage, of gradients on the first."""
    rank = Rank("Net")
    events: list[str] = []
    receiver: Any = rank.ends.gradients_in or rank.ends.activations_in
    link = receiver._link

    def noting(owner: Any, name: str, event: str) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (events.append(event), method(*args, **kwargs))[1])

    noting(receiver, "_packet", "memory")
    noting(link, "wait", "wait")
    noting(link, "irecv", "post")
    for _ in range(2):
        actions = SCHEDULES["gpipe"](2, 4)[rank.layout.stage]
        work = rank.work(rows(4), [1] * 4)
        events.clear()
        rank.engine.run(actions, work)
    return events[events.index("post") + 1 :]  # after the receive that begins the batch
