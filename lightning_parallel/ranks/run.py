"""A run of a strategy, as its parts see it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.user_collectives import Collectives


@dataclass(frozen=True)
class Run:
    """One call of ``Trainer.fit``, ``validate``, ``test`` or ``predict`` on this rank.

    Attributes:
        module: the user's.
        layout: which rank this is.
        groups: the process groups of this rank.
        collectives: those that Lightning and the user's code ask for.
        device: of this rank.
        precision: the Trainer's plugin.
        seed: the same on all ranks.
        ahead: gives how many batches a rank may be ahead of another one.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    layout: Layout
    groups: Groups
    collectives: Collectives
    device: torch.device
    precision: Precision
    seed: int
    ahead: Callable[[], int]

    @property
    def trains(self) -> bool:
        """Is it a call of ``Trainer.fit``?"""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def last_rank(self) -> int:
        """The global rank of the last stage of this pipeline."""
        return self.layout.rank_at(pipeline=self.layout.stages - 1)

    def warn(self, words: str) -> None:
        """Warn once for each replica of what the ends of its steps show: another one's samples may be well."""
        if self.layout.is_last_stage and self.layout.index("tensor") == 0:
            warnings.warn(words, stacklevel=3)
