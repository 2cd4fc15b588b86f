"""The callback that measures a run from inside its workers; each leaves one JSON file in the run's folder.

warm-up      | timed                                       | counted            | validation
memory grows | durations, threads, peak of memory, spans   | messages (slower)  | loss
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch._dynamo  # the first optimizer imports it: its memory is not the model's
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.comparison.timing import kept_waiting
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.staged import StagedStrategy
from recipes.traffic import Traffic
from recipes.work import coordinates

FILE = "measured-{rank}.json"


class Measure(Callback):
    """Measures all updates of a run but the first and the last few.

    Args:
        folder: of the run.
        warmup: updates before the timed ones.
        counted: updates after the timed ones, in which messages are counted.
    """

    reads_weights = False

    def __init__(self, folder: str, warmup: int, counted: int) -> None:
        self._folder = Path(folder)
        self._warmup, self._counted = warmup, counted
        self._baseline = 0
        self._batches = 0
        self._ends: list[float] = []  # of updates, from the last of the warm-up on
        self._traffic = Traffic()
        self._held: dict[str, int] = {}
        self._found: dict[str, Any] = {}
        # The same run, one after the other: what Lightning says of each is of no use here.
        for package in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(package).setLevel(logging.WARNING)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Here the data and the process groups are there, and the model is, whole, where it was built.
        built = (tensor for tensor in (*pl_module.parameters(), *pl_module.buffers()) if not tensor.is_meta)
        self._baseline = resident() - sum(tensor.nbytes for tensor in built)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        others = getattr(trainer.strategy, "parallel_devices", None)
        several = isinstance(trainer.strategy, DataParallelStrategy)
        self._gpus = devices_of(trainer.strategy.root_device, others if several else None)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        # The only place where gradients, too, are there under every strategy.
        if len(self._ends) == 1:
            self._held = held(pl_module, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        update, rest = divmod(self._batches, trainer.accumulate_grad_batches)
        timed = trainer.max_steps - self._counted
        if rest or update < self._warmup:
            return
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        if update <= timed:
            self._ends.append(time.monotonic())
        if update == self._warmup:
            self._start()
        elif update == timed:
            self._stop(trainer)
            self._traffic.__enter__()  # from here to the same hook of a later batch, both outside of any other mode
        elif update == trainer.max_steps:
            self._traffic.__exit__(None, None, None)
            self._count()

    def _start(self) -> None:
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        if not self._gpus:
            forget_peak()
        self._thread = seconds_of_thread()

    def _stop(self, trainer: L.Trainer) -> None:
        thread = shares(self._thread, seconds_of_thread())
        peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus]
        self._found = {
            "rank": trainer.global_rank,
            "coordinates": coordinates(trainer),
            "device": str(trainer.strategy.root_device),
            "seconds": [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)],
            "peaks": peaks or [peak_resident() - self._baseline],
            "held": self._held,
            "thread": thread,
        }
        strategy = trainer.strategy
        if isinstance(strategy, StagedStrategy):
            begin, end = self._ends[0], self._ends[-1]
            spans = [span for span in strategy.timeline.spans if begin <= span.start and span.end <= end]
            self._found |= {"spans": [asdict(span) for span in spans], "bubble": strategy.theoretical_bubble()}
            sizes = {"stages": strategy.layout.stages, "microbatches": strategy.at_work.microbatches.count}
            self._found["words"] = [f"strategy.{name}={size}" for name, size in sizes.items()]

    def _count(self) -> None:
        per_step = 1 / self._counted
        self._found |= {
            "sent": {kind: nbytes * per_step for kind, nbytes in self._traffic.sent.items()},
            "messages": {kind: count * per_step for kind, count in self._traffic.messages.items()},
            "received": self._traffic.received * per_step,
        }

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "sent" not in self._found:
            updates = self._batches // trainer.accumulate_grad_batches
            raise RuntimeError(
                f"trainer.max_steps={trainer.max_steps}, but training ended after {updates} updates, before all was "
                f"measured: leave trainer.max_epochs and limits out, or use fewer steps."
            )
        file = self._folder / FILE.format(rank=trainer.global_rank)
        file.write_text(json.dumps(self._found) + "\n")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _status("VmRSS")


def peak_resident() -> int:
    """The most bytes there were since :func:`forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def held(module: LightningModule, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Bytes of the parameters, gradients and optimizer state of this rank: of its shards, its stage."""
    parameters = [p for p in module.parameters() if not isinstance(p, AbsentTensor)]
    state = [value for each in optimizers for values in each.state.values() for value in values.values()]
    return {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _nbytes([value for value in state if isinstance(value, Tensor)]),
    }


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def devices_of(root: torch.device, others: Iterable[torch.device] | None) -> list[torch.device]:
    """The GPUs that this process uses, each once; none on the CPU."""
    return [device for device in dict.fromkeys(others or [root]) if device.type == "cuda"]


Seconds = tuple[float, float, float]  # of a thread: on the clock, on a core, and ready to run without one


def seconds_of_thread() -> Seconds:
    """Of the calling thread, since it began. Without a core it waits for the machine's load. While it waits for
    Python's interpreter lock or for a message, it is blocked."""
    return time.monotonic(), time.thread_time(), kept_waiting()


def shares(before: Seconds, after: Seconds) -> dict[str, float]:
    """Fractions of the time on the clock."""
    wall, computing, queued = (b - a for a, b in zip(before, after, strict=True))
    # The kernel books at its ticks: of a short while it may count a little more than went by.
    whole = max(wall, computing + queued) or 1.0
    return {"queued": queued / whole, "blocked": max(0.0, 1 - (computing + queued) / whole)}
