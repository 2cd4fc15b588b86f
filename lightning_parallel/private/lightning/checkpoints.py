"""How checkpoints are saved and opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.cloud_io import _atomic_save, _load
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving


def save_last(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Save what ModelCheckpoint calls the last checkpoint, whatever its triggers and ``save_last`` are. All ranks call
    it. Returns the path."""
    wanted, checkpoint.save_last = checkpoint.save_last, True
    try:
        checkpoint._save_last_checkpoint(trainer, checkpoint._monitor_candidates(trainer))
    finally:
        checkpoint.save_last = wanted
    return checkpoint.last_model_path


def open_directories(
    is_directory: Callable[[str | Path], bool],
    read: Callable[[str | Path, bool], Any],
    replacing: Callable[[Path], AbstractContextManager[Path]],
) -> None:
    """Let Lightning's own strategies and ``load_from_checkpoint`` open checkpoints that are directories, and let files
    replace them. Where there is no such directory nothing changes.

    Each of Lightning's ways ends in private functions, which expect a file; a file that is written where a directory is
    would land inside it. The public way is a ``CheckpointIO``: every Trainer would have to be given one, and
    ``load_from_checkpoint`` takes none.

    Args:
        is_directory: tells whether a path is such a checkpoint.
        read: reads a checkpoint, given its path and ``weights_only``.
        replacing: gives the path to write a file to that is to replace a directory.
    """

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path, str | Path) or not (Path(path).is_dir() or is_directory(path)):
            return _load(path, map_location, weights_only)
        content = read(path, weights_only is not False)
        if isinstance(map_location, str | torch.device):  # functions and dictionaries are about the files' storages
            content["state_dict"] = {name: tensor.to(map_location) for name, tensor in content["state_dict"].items()}
        return content

    def save(checkpoint: dict[str, Any], path: str | Path) -> None:
        if not is_directory(path):
            _atomic_save(checkpoint, path)
            return
        with replacing(Path(path)) as new:
            _atomic_save(checkpoint, new)

    saving.pl_load = torch_io.pl_load = load  # type: ignore[attr-defined,assignment]
    torch_io._atomic_save = save  # type: ignore[attr-defined,assignment]
