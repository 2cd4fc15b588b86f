"""Several chunks on the last stage: only the last chunk's runs of a step count.

A stage runs the user's step once for each of its chunks. On the last stage the run for the last chunk reaches the end
of the step. The runs for earlier chunks pass its beginning, too. What they log and count there is dropped::

    chunk 1    first lines of the step | leaves after its last layer           dropped
    chunk 3    first lines of the step | ... | loss, logs, metrics             counts
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric

from lightning_parallel.batch import rebuilt
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.results.logs import discard, logging_through
from lightning_parallel.tracing.snapshot import StateKept


class EarlierChunks:
    """Runs steps, and drops what runs for earlier chunks log and count."""

    def __init__(self, module: pl.LightningModule, stage: Stage) -> None:
        self._module, self._stage = module, stage
        units = [module.get_submodule(name) for name in stage.partition.units]
        inside = {id(part) for unit in units for part in unit.modules()}
        self._metrics = [part for part in module.modules() if isinstance(part, Metric) and id(part) not in inside]

    def run(self, step: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Run a step for the chunk that is under way. Each run gets its own containers, since the step may empty
        them."""
        arguments, more = rebuilt((arguments, more))
        if not self._stage.has_last_chunk or self._stage.runs_last_chunk:
            return step(*arguments, **more)
        with ExitStack() as dropped:
            dropped.enter_context(logging_through(self._module, discard))
            for metric in self._metrics:
                dropped.enter_context(StateKept(metric))
            return step(*arguments, **more)
