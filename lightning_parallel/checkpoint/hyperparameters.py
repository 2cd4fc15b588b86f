"""Hyperparameters that hold parts of the model are saved as the user gave them.

``save_hyperparameters()`` keeps a network or a metric among the arguments as the very object that is trained. While a
Trainer runs, each rank has a part of it, which can't be pickled. But Lightning also keeps a copy of the arguments, made
when they were given. A checkpoint gets this copy; what the network has learned is in its ``state_dict``.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


def save_as_given(checkpoint: dict[str, Any], trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Replace hyperparameters in a checkpoint that hold modules of ``module`` by Lightning's copies of them."""
    parts = {id(part) for part in module.modules()}
    for owner in (module, getattr(trainer, "datamodule", None)):
        held = {} if owner is None else checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)
        if not isinstance(held, dict):  # a container of OmegaConf, which holds no modules
            continue
        names = [name for name, value in held.items() if _holds(value, parts)]
        if owner is not None and names:
            given = owner.hparams_initial  # Lightning copies at each access
            held.update({name: given[name] for name in names if name in given})


class _FoundError(Exception):
    """Ends a search: a part of the model was found."""


class _Search(pickle.Pickler):
    """Visits all that an object holds, by pickling it to nowhere."""

    def __init__(self, parts: Collection[int]) -> None:
        super().__init__(_Nowhere())
        self._parts = parts

    def persistent_id(self, obj: Any) -> str | None:
        if id(obj) in self._parts:
            raise _FoundError
        return "" if isinstance(obj, Tensor) else None  # a tensor's values needn't be visited


class _Nowhere:
    def write(self, content: bytes) -> int:
        return len(content)


def _holds(value: Any, parts: Collection[int]) -> bool:
    if value is None or isinstance(value, str | int | float | Tensor):
        return False
    try:
        _Search(parts).dump(value)
    except _FoundError:
        return True
    except (pickle.PicklingError, TypeError, AttributeError):  # the save will raise it
        return False
    return False
