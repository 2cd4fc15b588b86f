"""An entry: a LightningModule of a package, with a loader as the package's users have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch

from tools.others.captured import captured

BATCH = 8  # samples of a batch of all replicas
STEPS = 2  # that are compared
SAMPLES = BATCH * 2 * STEPS  # of a data set: half of them for steps that aren't compared


@dataclass(frozen=True, slots=True)
class Entry:
    """A module, and data for it.

    Args:
        name: unique among the entries.
        package: as PyPI names it.
        module: makes the module. Called with a fixed seed, and `dtype` as the default dtype.
        loader: makes a loader of `SAMPLES` samples in a fixed order, given the size of a batch.
        trains: trains by the package's own interface, given the size of a batch; instead of `module` and `loader`.
        validates: whether the run validates, with the same loader.
        dtype: float64, unless the module has something that takes none.
        trainer: more settings of the Trainer, as users of the package give them.
    """

    name: str
    package: str
    module: Callable[[], L.LightningModule] | None = None
    loader: Callable[[int], Any] | None = None
    trains: Callable[[int], Any] | None = None
    validates: bool = True
    dtype: torch.dtype = torch.float64
    trainer: dict[str, Any] = field(default_factory=dict)
    layers: int = 99  # a layout with more stages refuses by itself

    def make(self, batch_size: int) -> tuple[L.LightningModule, dict[str, Any]]:
        """The module, in the entry's dtype, and the loaders, by the names of arguments of `Trainer.fit`: the same
        wherever they are made."""
        torch.manual_seed(7)
        if self.trains is not None:
            module, loaders = captured(partial(self.trains, batch_size))
        else:
            assert self.module is not None and self.loader is not None, "an entry has these or `trains`"
            module = self.module()
            torch.manual_seed(9)
            loaders = {"train_dataloaders": self.loader(batch_size)}
            if self.validates:
                torch.manual_seed(9)
                loaders["val_dataloaders"] = self.loader(batch_size)
        return module.to(self.dtype).train(), loaders
