"""What Lightning and the strategy add to the bare engine, where a step is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Contestant, OneProcess, Ours, OursAsync, Times, alternate, merge, timed_stream
from tools.bench.layers import fit, loss_of, masked_loss_of, sleeping
from tools.bench.rounds import by_round, middle, ratios

BARE, FIT, LOGGED, MASKED = "bare", "in Trainer.fit", "in Trainer.fit, loss logged", "in Trainer.fit, loss masked"


@dataclass(frozen=True)
class Sizes:
    """Steps of about ``step`` seconds, ``batches`` of them in each of ``rounds``; the first ``skip`` don't count."""

    step: float = 0.050
    microbatches: int = 4
    width: int = 512
    rounds: int = 8
    batches: int = 28
    skip: int = 8


QUICK = Sizes(rounds=1, batches=20, skip=4)


def measure(sizes: Sizes) -> list[Table]:
    runs = {
        "one process": processes.run(_one_process, 1, sizes),
        "1f1b, 2 stages": processes.run(_synchronous, 2, sizes),
        "async, 2 stages": processes.run(_asynchronous, 2, sizes),
    }
    rows: list[list[Cell]] = []
    for name, ranks in runs.items():
        times = merge(ranks)
        typical = {run: by_round(seconds, sizes.batches - 1 - sizes.skip) for run, seconds in times.items()}
        bare = median(typical[BARE])
        row: list[Cell] = [name, bare * 1e3]
        for run in (FIT, LOGGED):
            slower = [ratio - 1 for ratio in ratios(typical[run], typical[BARE])]
            row += [median(slower) * bare * 1e3, median(slower), middle([100 * part for part in slower], 1)]
        row.append(median(ratios(typical[MASKED], typical[FIT])) - 1)
        rows.append(row)
    columns = {
        "schedule": "",
        "bare (ms)": ".2f",
        "added (ms)": ".2f",
        "added": ".1%",
        "middle half (%)": "",
        "added, loss logged (ms)": ".2f",
        "added, loss logged": ".1%",
        "middle half, loss logged (%)": "",
        "a mask's share": ".1%",
    }
    return [
        Table(
            f"What Lightning and the strategy add, {sizes.microbatches} microbatches a batch",
            columns,
            rows,
            f"Time from batch to batch on the last stage, medians of {sizes.batches - 1 - sizes.skip} in each of "
            f"{sizes.rounds} rounds; added: median over the rounds of what was within one. Stages that sleep, an "
            "optimizer step a batch. One process: a plain loop, and Lightning with its own strategy. Loss logged: "
            "self.log in every step. A mask's share: a mean over some positions in the place of a mean over all.",
        )
    ]


def _one_process(sizes: Sizes) -> Times:
    def bare(layers: torch.nn.Sequential, batch: torch.Tensor) -> Contestant:
        return OneProcess(layers, batch, 1)

    return _compare(sizes, bare, lambda: "auto", actions=1)


def _synchronous(sizes: Sizes) -> Times:
    def bare(layers: torch.nn.Sequential, batch: torch.Tensor) -> Contestant:
        return Ours(layers, "1f1b", batch, sizes.microbatches)

    def strategy() -> Strategy:
        return PipelineStrategy(schedule="1f1b", microbatches=sizes.microbatches, balance="layers")

    return _compare(sizes, bare, strategy, actions=sizes.microbatches + 1)


def _asynchronous(sizes: Sizes) -> Times:
    def bare(layers: torch.nn.Sequential, batch: torch.Tensor) -> Contestant:
        return OursAsync(layers, batch, sizes.microbatches)

    def strategy() -> Strategy:
        return AsyncPipelineStrategy(microbatches=sizes.microbatches, correction=None, balance="layers")

    return _compare(sizes, bare, strategy, actions=sizes.microbatches)


def _compare(
    sizes: Sizes,
    bare: Callable[[torch.nn.Sequential, torch.Tensor], Contestant],
    strategy: Callable[[], Strategy | str],
    actions: int,
) -> Times:
    """A batch takes the time of ``actions`` forwards and backwards."""
    batch = torch.randn(sizes.microbatches, sizes.width, sizes.width)
    last = dist.get_rank() == 0

    def layers() -> torch.nn.Sequential:
        work = sizes.step / actions
        return sleeping(dist.get_world_size(), work / 3, 2 * work / 3)

    def trained(log: bool = False, loss: Callable[[torch.Tensor], torch.Tensor] = loss_of) -> list[float]:
        seconds = fit(layers(), strategy(), batch, sizes.batches, log=log, loss=loss)
        return seconds[sizes.skip :] if last else []

    runs: dict[str, Callable[[], list[float]]] = {
        BARE: partial(timed_stream, bare(layers(), batch), sizes.batches, sizes.skip),
        FIT: trained,
        LOGGED: partial(trained, log=True),
        MASKED: partial(trained, loss=masked_loss_of),
    }
    return alternate(runs, sizes.rounds)
