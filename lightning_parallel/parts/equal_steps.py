"""Predictions of fully sharded replicas: all take as many steps, though some have fewer batches.

Lightning deals out the samples of ``trainer.predict`` without repeating any, so a replica may have one batch less than
another. But each gathers its layers together with the others::

    replica 0    batch 0 | batch 1 | batch 2
    replica 1    batch 0 | batch 1 | batch 1 again, its prediction dropped
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_parallel.collectives import guarded

T = TypeVar("T")


class EqualSteps:
    """The prediction steps of this replica.

    Args:
        trainer: about to predict: its loop knows how many batches there are.
        replicas: the group. All of its ranks make one.
        device: of this rank.
    """

    def __init__(self, trainer: pl.Trainer, replicas: dist.ProcessGroup, device: torch.device) -> None:
        self._left = sum(trainer.predict_loop.max_batches)  # infinite where a loader doesn't know
        most = torch.tensor(self._left, dtype=torch.float64, device=device)
        guarded(dist.all_reduce, most, dist.ReduceOp.MAX, group=replicas)
        self._missing = int(most) - int(self._left) if math.isfinite(most) and math.isfinite(self._left) else 0

    def run(self, step: Callable[[], T]) -> T:
        """Run a batch's step; if it is the last, run it as often as other replicas still have batches."""
        output = step()
        self._left -= 1
        if self._left == 0:
            for _ in range(self._missing):
                step()
        return output
