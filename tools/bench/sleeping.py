"""Stages that sleep: what a schedule and its messages cost, apart from computing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.schedules.actions import placement
from lightning_parallel.schedules.named import SCHEDULES, Endless
from lightning_parallel.schedules.simulate import busy_across_batches, simulate
from lightning_parallel.schedules.steady import steady
from lightning_parallel.strategies.staged import StagedStrategy
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.by_hand import Bare, BareEndless, BareOnwards
from tools.bench.contestants import (
    CHUNKED,
    COMPARED,
    ONLY_OURS,
    Ours,
    OursOnwards,
    Times,
    Torch,
    alternate,
    merge,
    timed_steps,
    timed_stream,
)
from tools.bench.layers import fit, sleeping
from tools.bench.report import spread
from tools.schedule.costs import asynchronous_utilisation

_ENDLESS: Mapping[str, Endless] = MappingProxyType({"async": "1f1b", "async vhalf": "vhalf", "async vmin": "vmin"})
LATENCY = 1e-3  # seconds a message, for the theory; gloo between two processes takes about that for 1 MiB


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        synchronous: pairs of stages and microbatches. One stage: what the processor loses by sleeping, and no messages.
        chunked: the same, for schedules with two chunks a stage.
        asynchronous: numbers of stages.
        forward, backward: seconds that a stage sleeps.
        width: a microbatch is a float32 matrix of this many rows and columns; 512 makes 1 MiB.
        rounds, steps: of the synchronous contestants, ``steps`` each in every one of ``rounds``.
        fits, batches: ``fits`` trainings of ``batches`` batches, of which the last 60 % are measured.
    """

    synchronous: tuple[tuple[int, int], ...] = ((1, 8), (4, 8), (8, 8), (8, 16))
    chunked: tuple[tuple[int, int], ...] = ((4, 8), (8, 16))
    asynchronous: tuple[int, ...] = (4, 8)
    forward: float = 0.020
    backward: float = 0.040
    width: int = 512
    rounds: int = 3
    steps: int = 3
    fits: int = 3
    batches: int = 60


QUICK = Sizes(
    synchronous=((4, 8),),
    chunked=((4, 8),),
    asynchronous=(4,),
    forward=0.004,
    backward=0.008,
    rounds=2,
    steps=2,
    fits=1,
    batches=30,
)
_SKIPPED, _COUNTED = 4, 8  # batches
_NEVER_REACHED = 1e9  # a norm to clip at: no gradient is changed, but every update waits for the norm of the model
_BATCH_BY_BATCH = {
    "stages": "d",
    "microbatches": "d",
    "schedule": "",
    "batch (ms)": ".1f",
    "utilisation": ".3f",
    "range": "",
}


def measure(sizes: Sizes) -> Iterator[Table]:
    for table in (_synchronous, _onwards, _inside, _asynchronous):
        yield table(sizes)


def _synchronous(sizes: Sizes) -> Table:
    rows: list[list[Cell]] = []
    for names, places in ((COMPARED, sizes.synchronous), (CHUNKED, sizes.chunked)):
        for stages, microbatches in places:
            times = merge(processes.run(_steps, stages, names, microbatches, sizes))
            rows += (_row(name, stages, microbatches, seconds, sizes) for name, seconds in times.items())
    columns = {
        "stages": "d",
        "microbatches": "d",
        "schedule": "",
        "step (ms)": ".1f",
        "range": "",
        "utilisation": ".3f",
        "theory": ".3f",
    }
    return Table(
        f"Synchronous step, stages that sleep {sizes.forward * 1e3:g} + {sizes.backward * 1e3:g} ms",
        columns,
        rows,
        f"Utilisation: m(f + b) / step, which begins and ends for all stages at once. Theory: simulated with "
        f"{LATENCY * 1e3:g} ms a message. Half of a backward is the gradient of the input, half that of a weight. "
        f"Medians of {sizes.rounds * sizes.steps} steps, in turn; messages of {_size(sizes)}. By hand: all receives "
        f"posted before the batch, plain autograd.",
    )


def _row(name: str, stages: int, microbatches: int, seconds: list[float], sizes: Sizes) -> list[Cell]:
    """Of a contestant, named by its schedule and whose it is."""
    lists = SCHEDULES[name.split(", ")[0]](stages, microbatches)
    chunks = len(placement(lists)) // stages
    simulation = simulate(lists, sizes.forward / chunks, sizes.backward / chunks, latency=LATENCY)
    work, step = microbatches * (sizes.forward + sizes.backward), median(seconds)
    scatter = spread([each * 1e3 for each in seconds])
    return [stages, microbatches, name, step * 1e3, scatter, work / step, work / simulation.makespan]


def _steps(names: tuple[str, ...], microbatches: int, sizes: Sizes) -> Times:
    batch = torch.randn(microbatches, sizes.width, sizes.width)
    contestants = {
        f"{schedule}, {whose}": kind(_layers(schedule, sizes), schedule, batch, microbatches)
        for schedule in names
        for whose, kind in (("ours", Ours), ("torch", Torch), ("by hand", Bare))
        if whose != "torch" or schedule not in ONLY_OURS
    }
    for contestant in contestants.values():
        contestant.step()  # shapes are agreed on, absent layers asked
    return alternate(
        {name: partial(timed_steps, contestant, sizes.steps) for name, contestant in contestants.items()}, sizes.rounds
    )


def _layers(schedule: str, sizes: Sizes) -> nn.Sequential:
    """A layer for each chunk; a stage's sleep as long with two as with one."""
    chunks = 2 if schedule in CHUNKED or _ENDLESS.get(schedule, "1f1b") != "1f1b" else 1
    return sleeping(chunks * dist.get_world_size(), sizes.forward / chunks, sizes.backward / chunks)


def _onwards(sizes: Sizes) -> Table:
    rows: list[list[Cell]] = []
    for stages, microbatches in sizes.chunked:
        times = merge(processes.run(_streams, stages, microbatches, sizes))
        work = microbatches * (sizes.forward + sizes.backward)
        for name, seconds in times.items():
            theory = _busy(name.split(", ")[0], stages, microbatches, sizes)
            scatter = spread([work / each for each in seconds])
            rows.append([stages, microbatches, name, 1e3 * median(seconds), work / median(seconds), scatter, theory])
    return Table(
        "Across batches, outside of Trainer.fit",
        {**_BATCH_BY_BATCH, "theory": ".3f"},
        rows,
        f"As above, but each stage goes on to the next batch by itself. Medians of {sizes.rounds} x {_COUNTED} "
        f"batches, after {_SKIPPED}. By hand: the receives of a batch are posted a batch ahead. Asynchronous ones by "
        f"hand keep no versions of weights.",
    )


def _busy(name: str, stages: int, microbatches: int, sizes: Sizes) -> float | None:
    """The share of the time in which stages compute by theory."""
    if name == "async":
        return asynchronous_utilisation(stages, 0, sizes.forward, sizes.backward, LATENCY)
    of_chunk = 2 * LATENCY / sizes.forward
    if (shape := _ENDLESS.get(name, "1f1b")) != "1f1b":
        return steady(shape, stages, microbatches, of_chunk).busy
    return busy_across_batches(SCHEDULES[name](stages, microbatches), latency=of_chunk)


def _streams(microbatches: int, sizes: Sizes) -> Times:
    batch = torch.randn(microbatches, sizes.width, sizes.width)
    contestants: dict[str, Ours | Bare] = {
        f"zbv, {whose}": kind(_layers("zbv", sizes), "zbv", batch, microbatches)
        for whose, kind in (("ours", OursOnwards), ("by hand", BareOnwards))
    }
    for name, shape in _ENDLESS.items():
        contestants[f"{name}, by hand"] = BareEndless(_layers(name, sizes), shape, batch, microbatches)
    count = _SKIPPED + _COUNTED + 1
    runs = {name: partial(timed_stream, each, count, _SKIPPED) for name, each in contestants.items()}
    return alternate(runs, sizes.rounds)


def _inside(sizes: Sizes) -> Table:
    rows: list[list[Cell]] = []
    for stages, microbatches in sizes.chunked:
        times = merge(processes.run(_trained, stages, microbatches, sizes))
        work = microbatches * (sizes.forward + sizes.backward)
        for name, seconds in times.items():
            each = len(seconds) // sizes.fits
            fits = [median(seconds[i * each : (i + 1) * each]) for i in range(sizes.fits)]
            period = median(fits)
            rows.append([stages, microbatches, name, period * 1e3, work / period, spread([work / fit for fit in fits])])
    return Table(
        "Inside Trainer.fit, schedules side by side",
        _BATCH_BY_BATCH,
        rows,
        f"Utilisation: m(f + b) / time from batch to batch on the last stage, the median of {_COUNTED} batches after "
        f"{_SKIPPED}, none logged; the median of {sizes.fits} trainings, in turn. Clipped: by the "
        "norm of the whole model.",
    )


def _trained(microbatches: int, sizes: Sizes) -> Times:
    batch = torch.randn(microbatches, sizes.width, sizes.width)

    def run(schedule: Any, clip: float | None = None, **options: Any) -> list[float]:
        strategy: StagedStrategy
        if schedule in _ENDLESS:
            shape = _ENDLESS[schedule]
            strategy = AsyncPipelineStrategy(
                microbatches=microbatches, schedule=shape, correction=None, balance="layers"
            )
        else:
            strategy = PipelineStrategy(schedule=schedule, microbatches=microbatches, balance="layers", **options)
        seconds = fit(_layers(schedule, sizes), strategy, batch, _SKIPPED + _COUNTED + 1, clip=clip)
        return seconds[-_COUNTED:] if dist.get_rank() == 0 else []  # the last stage

    runs = {name: partial(run, name) for name in ("1f1b", *CHUNKED, *_ENDLESS)}
    runs["zbv, clipped"] = partial(run, "zbv", _NEVER_REACHED)
    runs["zbv, clipped, validated later"] = partial(run, "zbv", _NEVER_REACHED, post_validation=True)
    return alternate(runs, sizes.fits)


def _asynchronous(sizes: Sizes) -> Table:
    rows: list[list[Cell]] = []
    work = sizes.forward + sizes.backward
    for stages in sizes.asynchronous:
        times = merge(processes.run(_fits, stages, sizes))
        for extra, (name, seconds) in enumerate(times.items()):
            each = len(seconds) // sizes.fits
            fits = [sum(seconds[i * each : (i + 1) * each]) / each for i in range(sizes.fits)]
            period = median(fits)
            rows.append(
                [
                    stages,
                    name,
                    period * 1e3,
                    work / period,
                    spread([work / fit for fit in fits]),
                    asynchronous_utilisation(stages, extra, sizes.forward, sizes.backward, LATENCY),
                ]
            )
    columns = {
        "stages": "d",
        "schedule": "",
        "batch (ms)": ".1f",
        "utilisation": ".3f",
        "range": "",
        "theory": ".3f",
    }
    return Table(
        "Asynchronous, inside Trainer.fit, one microbatch an update",
        columns,
        rows,
        f"Utilisation: (f + b) / time a batch on the last stage, over the last 60 % of {sizes.batches} batches, "
        f"none logged; median of {sizes.fits} trainings. Theory: {LATENCY * 1e3:g} ms a message.",
    )


def _fits(sizes: Sizes) -> Times:
    stages = dist.get_world_size()
    batch = torch.randn(1, sizes.width, sizes.width)

    def run(extra: int) -> list[float]:
        layers = sleeping(stages, sizes.forward, sizes.backward)
        strategy = AsyncPipelineStrategy(microbatches=1, correction=None, extra_in_flight=extra, balance="layers")
        seconds = fit(layers, strategy, batch, sizes.batches)
        return seconds[-round(0.6 * sizes.batches) :] if dist.get_rank() == 0 else []  # the last stage

    return alternate({f"async, {extra} extra in flight": partial(run, extra) for extra in (0, 1)}, sizes.fits)


def _size(sizes: Sizes) -> str:
    return f"{sizes.width**2 * 4 / 2**20:g} MiB"
