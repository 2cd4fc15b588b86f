"""Entries that go wrong in a known way, for the tests of the runner. They are no part of the zoo."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tools.zoo.entry import Entry
from tools.zoo.handwritten.parts import Stack, rows


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


ENTRIES = (Entry("perturbed", "by hand", Perturbed, rows), Entry("perturbed weights", "by hand", PerturbedLog, rows))
