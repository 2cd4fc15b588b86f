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
import torch
from torchmetrics import Metric

from lightning_parallel.batch import rebuilt, tensors
from lightning_parallel.parts.logs import logging_through
from lightning_parallel.pipeline.flow import FlowError
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.one_sided import TWICE
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.torch_private import version_of


class BatchWatch:
    """Tells whether a step changes its batch in place. A stage with several chunks would do it once for each."""

    def __init__(self) -> None:
        self._changed = False

    def look(self, step: Callable[..., Any], arguments: tuple[Any, ...], **more: Any) -> Any:
        """Run a step in a look at it, on a batch of its own."""
        own = rebuilt((arguments, more), torch.clone)
        given = [(tensor, version_of(tensor)) for tensor in tensors(own)]
        try:
            return step(*own[0], **own[1])
        finally:
            self._changed |= any(version_of(tensor) != version for tensor, version in given)

    def check(self, name: str, parts: Partition) -> None:
        """After a look at a step of this name, on all ranks.

        Raises:
            FlowError: it changes its batch, and a stage has several chunks.
        """
        changed, self._changed = self._changed, False
        if changed and parts.chunks > parts.stages:
            raise FlowError(
                f"{name} changes a tensor of its batch in place. {TWICE} change a clone, do it in the data loader, or "
                f"take a schedule with one chunk a stage ('1f1b')."
            )


class EarlierChunks:
    """Runs steps, and drops what shouldn't count.

    Args:
        module: whose steps they are.
        stage: of this rank.

    Attributes:
        watch: tells of a step whether it changes its batch.
    """

    def __init__(self, module: pl.LightningModule, stage: Stage) -> None:
        self.watch = BatchWatch()
        self._module, self._stage = module, stage
        units = [module.get_submodule(name) for name in stage.partition.units]
        inside = {id(part) for unit in units for part in unit.modules()}
        self._metrics = [part for part in module.modules() if isinstance(part, Metric) and id(part) not in inside]

    def run(self, step: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Run a step for the chunk that is under way, on containers of its own if the stage has several."""
        if len(self._stage.chunks) > 1:
            arguments, more = rebuilt((arguments, more))
        if not self._stage.has_last_chunk or self._stage.runs_last_chunk:
            return step(*arguments, **more)
        with ExitStack() as dropped:
            dropped.enter_context(logging_through(self._module, _drop))
            for metric in self._metrics:
                dropped.enter_context(StateKept(metric))
            return step(*arguments, **more)


def _drop(*args: Any, **kwargs: Any) -> None:
    """``self.log`` in a run that doesn't count."""
