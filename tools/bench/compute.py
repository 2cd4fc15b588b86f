"""Transformer blocks on two and four stages, a thread each: what is left of the speed of two cores, and what a rank
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.comparison.held import Held
from lightning_parallel.schedules.named import Endless
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.by_hand import BareAsync
from tools.bench.contestants import (
    CHUNKED,
    COMPARED,
    ONLY_OURS,
    Contestant,
    OneProcess,
    Ours,
    OursAsync,
    Times,
    Torch,
    alternate,
    merge,
    timed_steps,
    timed_stream,
)
from tools.bench.layers import adamw, blocks, fit
from tools.bench.report import spread
from tools.bench.rounds import middle, ratios

ONE = "one process, one thread"
_TRIED = 2  # batches after the first, in which a pair of microbatches is tried as one
_PAIRED = (*COMPARED, *CHUNKED)
_SHAPES: tuple[Endless, ...] = ("vhalf", "vmin")


@dataclass(frozen=True)
class Sizes:
    """A model of ``layers`` blocks of ``width``, batches of ``microbatches`` x ``samples`` x ``length`` tokens;
    ``rounds`` in which each contestant runs ``batches`` that count, and one before them that doesn't; ``pairs`` of
    batches, one of ours and one of torch's, for each synchronous schedule, over each number of ``stages``."""

    layers: int = 8
    width: int = 512
    length: int = 128
    samples: int = 2
    microbatches: int = 8
    rounds: int = 3
    batches: int = 1
    pairs: int = 12
    stages: tuple[int, ...] = (2, 4)


QUICK = Sizes(width=128, length=64, rounds=2, batches=3, pairs=6)


def measure(sizes: Sizes) -> Iterator[Table]:
    yield _speed(sizes)
    for stages in sizes.stages:
        yield _beside(sizes, stages)


def _speed(sizes: Sizes) -> Table:
    times = merge(processes.run(_times, 2, sizes))
    tokens = sizes.microbatches * sizes.samples * sizes.length
    one = median(times[ONE])
    rows: list[list[Cell]] = [
        [name, tokens / median(seconds), one / median(seconds), spread([one / s for s in seconds], 2)]
        for name, seconds in times.items()
    ]
    return Table(
        f"Real compute: {sizes.layers} transformer blocks, d {sizes.width}, T {sizes.length}, "
        f"{sizes.microbatches} microbatches of {sizes.samples}, 2 stages, a thread each",
        {"contestant": "", "tokens/s": ",.0f", "speed-up": ".3f", "range": ""},
        rows,
        f"Speed-up over {ONE}; AdamW, float32. Medians of {sizes.rounds * sizes.batches} batches, in turn; "
        "asynchronous ones between the ends of batches on the last stage. By hand: isend and irecv posted ahead, "
        "plain autograd, weights copied at each update.",
    )


def _beside(sizes: Sizes, stages: int) -> Table:
    """The machine's speed drifts by more than the two differ: so batch by batch."""
    ranks = processes.run(_pairs, stages, sizes)
    times = merge([times for times, _ in ranks])
    held = {name: max(rank[name] for _, rank in ranks) / 2**20 for name in times}
    rows: list[list[Cell]] = []
    for schedule in _PAIRED:
        ours, theirs = times[f"{schedule}, ours"], times.get(f"{schedule}, torch")
        row: list[Cell] = [schedule, median(ours) * 1e3, None, None, None, None]
        of_memory: list[Cell] = [held[f"{schedule}, ours"], held.get(f"{schedule}, torch")]
        if theirs is not None:
            slower = ratios(ours, theirs)
            row[2:] = median(theirs) * 1e3, median(slower), middle(slower), sum(ratio < 1 for ratio in slower)
        beside = ratios(ours, times["1f1b, ours"])
        rows.append([*row, median(beside), middle(beside), *of_memory])
    return Table(
        f"Real compute, synchronous schedules beside torch's, batch by batch: {stages} stages",
        {
            "schedule": "",
            "ours (ms)": ".0f",
            "torch (ms)": ".0f",
            "ours / torch": ".3f",
            "middle half": "",
            f"faster, of {sizes.pairs}": "d",
            "ours / our 1f1b": ".3f",
            "middle half, beside 1f1b": "",
            "held, ours (MiB)": ".0f",
            "held, torch (MiB)": ".0f",
        },
        rows,
        "The same model; interleaved and those in a V have two chunks a stage. Medians; a ratio is that of the median "
        "pair. A pair's two batches run one after the other, ours first in every second one; our 1f1b's is that of "
        "the same round. Held: tensors at once on the fullest rank, parameters and AdamW's state among them, in a "
        "batch by itself; messages that wait aren't seen.",
    )


def _pairs(sizes: Sizes) -> tuple[Times, dict[str, int]]:
    """Seconds of batches, and the bytes that this rank holds, by contestant."""
    batch = _batch(sizes)
    runs = {}
    held = {}
    for schedule in _PAIRED:
        for whose, kind in (("ours", Ours), ("torch", Torch)):
            if whose == "torch" and schedule in ONLY_OURS:
                continue
            contestant = kind(blocks(sizes.layers, sizes.width), schedule, batch, sizes.microbatches, adamw)
            held[f"{schedule}, {whose}"] = _held(contestant)
            runs[f"{schedule}, {whose}"] = partial(timed_steps, contestant, 1)
    return alternate(runs, sizes.pairs), held


def _held(contestant: Contestant) -> int:
    """The most bytes at once in the contestant's second batch, after what it keeps between batches has been seen."""
    with Held() as held:
        contestant.step()
        held.forget()
        contestant.step()
    return held.most


def _batch(sizes: Sizes) -> torch.Tensor:
    return torch.randn(sizes.microbatches * sizes.samples, sizes.length, sizes.width)


def _times(sizes: Sizes) -> Times:
    batch = _batch(sizes)
    count = sizes.microbatches

    def synchronous(contestant: Ours | Torch | OneProcess) -> Callable[[], list[float]]:
        contestant.step()
        return partial(timed_steps, contestant, sizes.batches)

    def asynchronous(contestant: OursAsync | BareAsync) -> Callable[[], list[float]]:
        return partial(timed_stream, contestant, sizes.batches + 1, skip=0)

    def trained(make: Callable[[], AsyncPipelineStrategy | PipelineStrategy]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            seconds = fit(model(), make(), batch, sizes.batches + 1 + _TRIED, adamw)
            return seconds[_TRIED:] if dist.get_rank() == 0 else []

        return run

    def in_a_v(shape: Endless) -> AsyncPipelineStrategy:
        return AsyncPipelineStrategy(schedule=shape, microbatches=count, correction=None, balance="layers")

    def model() -> torch.nn.Sequential:
        return blocks(sizes.layers, sizes.width)

    runs = {
        ONE: synchronous(OneProcess(model(), batch, count, adamw)),
        "gpipe, ours": synchronous(Ours(model(), "gpipe", batch, count, adamw)),
        "gpipe, torch": synchronous(Torch(model(), "gpipe", batch, count, adamw)),
        "1f1b, ours": synchronous(Ours(model(), "1f1b", batch, count, adamw)),
        "1f1b, torch": synchronous(Torch(model(), "1f1b", batch, count, adamw)),
        "1f1b, ours in Trainer.fit": trained(
            lambda: PipelineStrategy(schedule="1f1b", microbatches=count, balance="layers")
        ),
        "async, by hand": asynchronous(BareAsync(model(), batch, count, adamw)),
        "async, ours": asynchronous(OursAsync(model(), batch, count, optimizer=adamw)),
        "async, ours in Trainer.fit": trained(
            lambda: AsyncPipelineStrategy(microbatches=count, correction=None, balance="layers")
        ),
        **{f"async {shape}, ours in Trainer.fit": trained(partial(in_a_v, shape)) for shape in _SHAPES},
    }
    return alternate(runs, sizes.rounds)
