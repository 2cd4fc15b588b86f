"""The source of a Trainer's batches: its loops' loaders."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader


class LoaderSource:
    """Where the loop that a Trainer is about to run gets its loaders from: the loop's private ``_data_source``."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._source: Any = trainer._active_loop._data_source  # type: ignore[union-attr]

    def get(self) -> Any:
        """The loaders as the user returns or passes them. How they were made is recorded: Lightning makes them anew
        with another sampler, for which it needs that."""
        return _request_dataloader(self._source)

    def hand_over(self, loaders: Any) -> None:
        """Give Lightning these loaders the next time it asks, unless the user has passed others by then."""
        instance = self._source.instance

        def dataloader() -> Any:
            del self._source.dataloader
            return loaders if self._source.instance is instance else self._source.dataloader()

        self._source.dataloader = dataloader


def take_back_loaders(trainer: pl.Trainer) -> None:
    """Drop what a run that has ended was given: Lightning no longer asks for its loaders, even if it never got them."""
    for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        vars(loop._data_source).pop("dataloader", None)


def mode_of(loader: CombinedLoader) -> Any:
    """The mode of a combined loader ("min_size", "max_size_cycle", ...)."""
    return loader._mode


def before_batch_transfer(module: pl.LightningModule, batch: Any) -> Any:
    """The user's hook ``on_before_batch_transfer``, from the module or its data module."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)
