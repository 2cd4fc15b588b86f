"""Whole trainings: the wall time of the asynchronous pipeline with corrected forwards beside 1F1B's, all included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.pipeline.staleness import Correction
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Times, alternate, merge
from tools.bench.layers import MakeOptimizer, adamw, blocks, fit, sgd, sleeping
from tools.bench.report import spread

SYNCHRONOUS, ASYNCHRONOUS = "1f1b", "async"


@dataclass(frozen=True)
class Sizes:
    """Trainings of ``batches`` updates, twice as many microbatches each as there are stages.

    Attributes:
        sleeping: stages that sleep ``forward`` and ``backward`` seconds a microbatch.
        computing: stages of ``layers`` transformer blocks in all, of ``width``; microbatches of ``samples`` x
            ``length`` tokens.
    """

    sleeping: int = 4
    forward: float = 0.010
    backward: float = 0.020
    computing: int = 2
    layers: int = 8
    width: int = 256
    samples: int = 4
    length: int = 128
    batches: int = 20
    rounds: int = 3


QUICK = Sizes(forward=0.002, backward=0.004, width=64, length=32, batches=6, rounds=1)


def measure(sizes: Sizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for stages, kind, run in (
        (sizes.computing, "that compute", _computing),
        (sizes.sleeping, "that sleep", _sleeping),
    ):
        times = merge(processes.run(run, stages, sizes))
        base = median(times[SYNCHRONOUS])
        theory = (3 * stages - 1) / (2 * stages)
        for name, seconds in times.items():
            rows.append(
                [
                    f"{stages} {kind}",
                    name,
                    median(seconds),
                    base / median(seconds),
                    spread([base / s for s in seconds]),
                    1.0 if name == SYNCHRONOUS else theory,
                ]
            )
    columns = {"stages": "", "schedule": "", "training (s)": ".2f", "speed-up": ".3f", "range": "", "theory": ".3f"}
    return [
        Table(
            f"Whole trainings of {sizes.batches} updates, in Trainer.fit",
            columns,
            rows,
            "From the Trainer's start to its end: set-up, fill and drain included. 2 p microbatches an update. "
            f"Speed-up: 1f1b's median time divided by it; medians of {sizes.rounds}, in turn. Theory: (m + p - 1) / m.",
        )
    ]


def _sleeping(sizes: Sizes) -> Times:
    stages = dist.get_world_size()
    batch = torch.randn(2 * stages, sizes.width, sizes.width)
    return _compare(sizes, lambda: sleeping(stages, sizes.forward, sizes.backward), batch, sgd)


def _computing(sizes: Sizes) -> Times:
    batch = torch.randn(2 * dist.get_world_size() * sizes.samples, sizes.length, sizes.width)
    return _compare(sizes, lambda: blocks(sizes.layers, sizes.width), batch, adamw)


def _compare(sizes: Sizes, layers: Callable[[], nn.Sequential], batch: Tensor, optimizer: MakeOptimizer) -> Times:
    count = 2 * dist.get_world_size()

    def asynchronous(correction: Correction) -> AsyncPipelineStrategy:
        return AsyncPipelineStrategy(microbatches=count, correction=correction, balance="layers")

    def timed(make: Callable[[], AsyncPipelineStrategy | PipelineStrategy]) -> list[float]:
        start = time.perf_counter()
        fit(layers(), make(), batch, sizes.batches, optimizer)
        return [time.perf_counter() - start] if dist.get_rank() == 0 else []

    runs: dict[str, Callable[[], list[float]]] = {
        SYNCHRONOUS: partial(timed, lambda: PipelineStrategy(schedule="1f1b", microbatches=count, balance="layers")),
        f"{ASYNCHRONOUS}, uncorrected": partial(timed, partial(asynchronous, None)),
        f"{ASYNCHRONOUS}, error feedback": partial(timed, partial(asynchronous, "error_feedback")),
        f"{ASYNCHRONOUS}, second order": partial(timed, partial(asynchronous, "second_order")),
    }
    return alternate(runs, sizes.rounds)
