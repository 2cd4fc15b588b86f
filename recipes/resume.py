"""Which checkpoint a run goes on from: ``ckpt_path``, or with ``resume=auto`` the newest one in its folder."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint import is_checkpoint

Config = Mapping[str, Any]

LAST = "last"  # a value of ckpt_path


def chosen(config: Config) -> str | None:
    """The path of the checkpoint to resume from; None for a fresh start."""
    found = newest(config) if config["resume"] == "auto" or config["ckpt_path"] == LAST else None
    return found or (config["ckpt_path"] if config["ckpt_path"] != LAST else None)


def newest(config: Config) -> str | None:
    """The newest whole checkpoint that the run's callbacks have saved in its folder; None for none."""
    whole = [path for path in _saved(config) if is_whole(path)]
    return str(max(whole, key=_saved_at)) if whole else None


def is_whole(path: Path) -> bool:
    """Is it a checkpoint, not only a part of one? A file ends with the table of its contents."""
    return is_checkpoint(path) or (path.is_file() and zipfile.is_zipfile(path))


def _saved(config: Config) -> Iterator[Path]:
    for node in (node for node in config["callbacks"].values() if not node.get("save_weights_only")):
        folder = Path(node.get("dirpath") or Path(config["paths"]["output_dir"]) / "checkpoints")
        if folder.is_dir():
            yield from folder.glob("*.ckpt")
            # A crash while a directory was replaced may leave the old one so, alone. It opens under its own name.
            yield from (old.with_suffix("") for old in folder.glob("*.ckpt.old") if not old.with_suffix("").exists())


def _saved_at(path: Path) -> int:
    place = path if path.exists() else path.with_name(f"{path.name}.old")
    return place.stat().st_mtime_ns
