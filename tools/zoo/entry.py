"""What an entry of the zoo is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import lightning.pytorch as L
import torch

SAMPLES = 8  # of a batch
STEPS = 4


class Nature(StrEnum):
    """Why a model can't have one process's numbers when its batch is divided, whoever divides it."""

    STATISTICS = "BatchNorm normalises over a microbatch"
    DRAWS = "each microbatch draws random numbers of its own"
    SAMPLES = "samples of a microbatch are compared with each other"
    BALANCE = "the loss of the router is a product of means over a microbatch"
    LABELS = "the loss is a mean over labels, and each rank has another number of them"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model, and data for it.

    Args:
        name: unique in the zoo.
        source: the library that the model is from, or "by hand".
        module: makes the module. Called with a fixed seed, and `dtype` as the default dtype.
        batch: makes a batch of `SAMPLES` samples, random numbers from the global generator, which has a fixed seed.
        layers: in how many stages the model could be cut at most.
        by_nature: why it differs from one process when its batch is divided; None if it shouldn't.
        dtype: float64, unless a kernel of the model has no float64; then the comparison is as much coarser.
    """

    name: str
    source: str
    module: Callable[[], L.LightningModule]
    batch: Callable[[], Any]
    layers: int = 4
    by_nature: Nature | None = None
    dtype: torch.dtype = torch.float64

    def build(self) -> L.LightningModule:
        """The module, in the entry's dtype, the same wherever it is built.

        Noise is added to the weights: those that begin at zero (LoRA's, a last layer's) would keep others out of the
        comparison.
        """
        torch.manual_seed(7)
        module = self.module().to(self.dtype)
        torch.manual_seed(8)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return module.train()

    def batches(self) -> list[Any]:
        """The data of a run, the same wherever it is made."""
        torch.manual_seed(9)
        return [self.batch() for _ in range(STEPS)]
