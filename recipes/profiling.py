"""``trainer.profiler``: where the time goes, in files of each rank in the run's folder ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lightning_parallel.strategies.base import LayoutStrategy

_WAIT, _WARM_UP, _TRACED = 1, 1, 3  # batches


class TraceOfSteps(Callback):
    """Writes torch's trace of the third to the fifth training batch, ``trace_rank0.json`` and so on: of fewer, if
    training ends before. Lightning's own profiler ends its trace at a validation, and hooks the modules, which in a
    pipeline don't run to their ends. Stages that are ahead of others drain before the first of these batches and after
    the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: profile | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path = self._folder / f"trace_rank{trainer.global_rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=_WAIT, warmup=_WARM_UP, active=_TRACED, repeat=1),
            on_trace_ready=lambda traced: traced.export_chrome_trace(str(path)),
        )
        self._profile.start()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._profile is None:
            return
        # A message that is under way when torch's profiler begins or ends may crash the process.
        turns = self._profile.step_num + 1 in (_WAIT, _WAIT + _WARM_UP, _WAIT + _WARM_UP + _TRACED)
        if turns and isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.drain()
        self._profile.step()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profile is not None and isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.drain()
        self._end()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # To end a trace amid messages may crash the process before the error is told.
        self._profile = None

    def _end(self) -> None:
        if self._profile is not None:
            traced, self._profile = self._profile, None
            traced.stop()


def profiler(name: str | None, folder: Path, rank: int) -> Profiler | None:
    """That of Lightning's which ``trainer.profiler`` names; None for torch's, which is a callback, and for none."""
    if name == "simple":
        return SimpleProfiler(dirpath=folder, filename=f"rank{rank}")
    return AdvancedProfiler(dirpath=folder, filename=f"rank{rank}") if name == "advanced" else None
