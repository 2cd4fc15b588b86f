"""Trains an entry of the zoo on one rank, inside a worker of the pool."""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel.batch import split
from lightning_parallel.ranks.shard import Shard
from tools.workers.held import weights_of
from tools.zoo import layouts
from tools.zoo.entry import Entry
from tools.zoo.precision import everything_in

PACKAGE = Path(lightning_parallel.__file__).parent
QUIET: dict[str, Any] = {  # settings of a Trainer that does nothing beside
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(slots=True)
class Error:
    """What a rank raised.

    Attributes:
        kind: the name of the exception's class.
        message: its text.
        is_refusal: whether it is a ValueError or RuntimeError raised by lightning_parallel.
        trace: the whole traceback.
        seconds: since the rank began.
    """

    kind: str
    message: str
    is_refusal: bool
    trace: str
    seconds: float


@dataclass(slots=True)
class Report:
    """What a rank has after a run.

    Attributes:
        losses: one a step.
        weights: those that this rank holds, or its shard of them.
        shards: of which weights it holds a shard.
        layers: between which a pipeline was cut.
        updates: the optimizer steps that it made.
        error: how the run ended, if not well.
        warnings: what lightning_parallel has warned of, where a run notes it.
        draws: whether a step draws random numbers, where a run notes it.
        batches: a digest of each, where a run notes it.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    updates: int = 0
    error: Error | None = None
    warnings: list[str] = field(default_factory=list)
    draws: bool = False
    batches: list[str] = field(default_factory=list)


class Witness(Callback):
    """Notes losses and counts updates."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.losses: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.manual_seed(11)  # whatever the strategy's set-up has drawn

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.report.updates += 1

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"])

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.report.losses = [float(loss) for loss in self.losses]  # before, a late stage would have waited for them


def load(room: str, name: str) -> Entry:
    """An entry, by the module that lists it in ENTRIES. (Its factories are functions that can't be sent.)"""
    (entry,) = (entry for entry in importlib.import_module(room).ENTRIES if entry.name == name)
    return entry


def train(room: str, name: str, layout_name: str, layers: tuple[str, ...] = ()) -> Report:
    """Train an entry on this rank of a layout, for the batches that it has. Errors are reported, not raised. A pipeline
    may be told its layers."""

    def run(report: Report) -> None:
        entry = load(room, name)
        with everything_in(entry.dtype):
            _fit(entry, layouts.find(layout_name), report, layers)

    return reported(run)


def reported(run: Callable[[Report], None]) -> Report:
    """What a run notes in its report, and its error, if it ends in one."""
    report, begin = Report(), monotonic()
    try:
        run(report)
    except BaseException as error:  # SystemExit too
        report.error = described(error, monotonic() - begin)
        traceback.clear_frames(error.__traceback__)
    if report.error is not None:
        hang_up()
    return report


def hang_up() -> None:
    """Closed connections tell the ranks that wait for this one, as the end of a user's process would."""
    gc.collect()  # a pipeline's engine holds some
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _fit(entry: Entry, layout: layouts.Layout, report: Report, layers: tuple[str, ...]) -> None:
    module, batches = entry.build(), entry.batches()
    trainer = L.Trainer(
        **QUIET,
        devices=layout.ranks,
        strategy=layout.make(layers),
        max_epochs=1,
        use_distributed_sampler=False,  # the shares are made here, so that all ranks' are one process's batch
        callbacks=[Witness(report)],
    )
    if layout.shares:
        batches = [split(batch, layout.ranks)[trainer.global_rank] for batch in batches]
    torch.manual_seed(11)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    collect(report, trainer, module)


def collect(report: Report, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Note what this rank has of the weights."""
    report.weights = weights_of(module)
    local = getattr(trainer.strategy, "local_model", None)
    report.shards = {} if local is None else dict(local.shards)
    if isinstance(trainer.strategy, lightning_parallel.PipelineStrategy):
        report.layers = tuple(trainer.strategy.stage.partition.layers)


def described(error: BaseException, seconds: float) -> Error:
    """What a report says of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    kind = type(error)
    is_refusal = ours and (kind in (ValueError, RuntimeError) or _is_own(kind))
    text = "".join(traceback.format_exception(error))
    return Error(kind.__name__, str(error), is_refusal, text, seconds)


def _is_own(kind: type[BaseException]) -> bool:
    return issubclass(kind, ValueError | RuntimeError) and kind.__module__.startswith("lightning_parallel")
