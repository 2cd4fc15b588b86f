"""Entries that go wrong in a known way, for the tests of the runner. They are no part of the zoo."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from tests.zoo.entry import Entry, Nature
from tests.zoo.handwritten.parts import Stack, rows


def ranks() -> int:
    """Of the run; inside a step torch.distributed says how many replicas there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Perturbed(Stack):
    """A loss that is off by a millionth on two ranks."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 1e-6 * (ranks() - 1))


class PerturbedLog(Stack):
    """Losses that are right, and a weight that is off on the second rank."""

    def on_train_end(self) -> None:
        if ranks() > 1 and dist.get_rank() == 1:
            for parameter in self.parameters():
                parameter.data.add_(1e-6)


class PerturbedDropout(Perturbed):
    """What depends on the number of ranks isn't so by nature."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class Sleeping(Stack):
    """A rank that never comes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if ranks() > 1 and rank_zero_only.rank == 1 and batch_idx == 1:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


class LateError(Stack):
    """Fails in the third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if ranks() > 1 and batch_idx == 2:
            raise ValueError("too late to refuse")


class OwnError(Stack):
    """An error of the module's own, before any update."""

    def on_train_start(self) -> None:
        if ranks() > 1:
            raise ValueError("not a refusal of the strategy")


class OneRankError(Stack):
    """An error on one rank only."""

    def on_train_start(self) -> None:
        if ranks() > 1 and dist.get_rank() == 1:
            raise KeyError("only here")


class Useless(Stack):
    """Fails in one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("never trains")


ENTRIES = (
    Entry("perturbed", "by hand", Perturbed, rows),
    Entry("perturbed weights", "by hand", PerturbedLog, rows),
    Entry("perturbed dropout", "by hand", PerturbedDropout, rows, by_nature=Nature.DRAWS),
    Entry("sleeping", "by hand", Sleeping, rows),
    Entry("late error", "by hand", LateError, rows),
    Entry("own error", "by hand", OwnError, rows),
    Entry("error on one rank", "by hand", OneRankError, rows),
    Entry("useless", "by hand", Useless, rows),
)
