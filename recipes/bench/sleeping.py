"""Stages that sleep: what a schedule and its messages cost, apart from computing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from lightning_parallel import AsyncPipelineStrategy
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.pipeline.simulate import asynchronous_utilisation, simulate
from recipes.bench import processes
from recipes.bench.by_hand import Bare
from recipes.bench.contestants import COMPARED, Ours, Times, Torch, alternate, merge, timed_steps
from recipes.bench.layers import fit, sleeping
from recipes.bench.report import Cell, Table, spread

LATENCY = 1e-3  # seconds a message, for the theory; gloo between two processes takes about that for 1 MiB


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        synchronous: pairs of stages and microbatches. One stage: what the processor loses by sleeping, and no messages.
        asynchronous: numbers of stages.
        forward, backward: seconds that a stage sleeps.
        width: a microbatch is a float32 matrix of this many rows and columns; 512 makes 1 MiB.
        rounds, steps: of the synchronous contestants, ``steps`` each in every one of ``rounds``.
        fits, batches: ``fits`` trainings of ``batches`` batches, of which the last 60 % are measured.
    """

    synchronous: tuple[tuple[int, int], ...] = ((1, 8), (4, 8), (8, 8), (8, 16))
    asynchronous: tuple[int, ...] = (4, 8)
    forward: float = 0.020
    backward: float = 0.040
    width: int = 512
    rounds: int = 3
    steps: int = 3
    fits: int = 3
    batches: int = 60


QUICK = Sizes(
    synchronous=((4, 8),), asynchronous=(4,), forward=0.004, backward=0.008, rounds=2, steps=2, fits=1, batches=30
)


def measure(sizes: Sizes) -> list[Table]:
    return [_synchronous(sizes), _asynchronous(sizes)]


def _synchronous(sizes: Sizes) -> Table:
    rows: list[list[Cell]] = []
    for stages, microbatches in sizes.synchronous:
        times = merge(processes.run(_steps, stages, microbatches, sizes))
        work = sizes.forward + sizes.backward
        ideal = (microbatches + stages - 1) * work
        for name, seconds in times.items():
            simulation = simulate(
                SCHEDULES[name.split(", ")[0]](stages, microbatches), sizes.forward, sizes.backward, latency=LATENCY
            )
            step = median(seconds)
            rows.append(
                [
                    stages,
                    microbatches,
                    name,
                    step * 1e3,
                    step / ideal,
                    spread([s / ideal for s in seconds]),
                    simulation.makespan / ideal,
                    microbatches * work / step,
                ]
            )
    columns = {
        "stages": "d",
        "microbatches": "d",
        "schedule": "",
        "step (ms)": ".1f",
        "step / ideal": ".3f",
        "range": "",
        "theory": ".3f",
        "utilisation": ".3f",
    }
    return Table(
        f"Synchronous step, stages that sleep {sizes.forward * 1e3:g} + {sizes.backward * 1e3:g} ms",
        columns,
        rows,
        f"Ideal: (m + p - 1)(f + b), no message takes time. Theory: simulated with {LATENCY * 1e3:g} ms a message. "
        f"Medians of {sizes.rounds * sizes.steps} steps, in turn; messages of {_size(sizes)}. By hand: all receives "
        "posted before the batch, plain autograd.",
    )


def _steps(microbatches: int, sizes: Sizes) -> Times:
    batch = torch.randn(microbatches, sizes.width, sizes.width)
    contestants = {
        f"{schedule}, {whose}": kind(
            sleeping(dist.get_world_size(), sizes.forward, sizes.backward), schedule, batch, microbatches
        )
        for schedule in COMPARED
        for whose, kind in (("ours", Ours), ("torch", Torch), ("by hand", Bare))
    }
    for contestant in contestants.values():
        contestant.step()  # shapes are agreed on, absent layers asked
    return alternate(
        {name: partial(timed_steps, contestant, sizes.steps) for name, contestant in contestants.items()}, sizes.rounds
    )


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
