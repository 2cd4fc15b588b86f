"""Finds which checkpoints are whole, without reading them, and which of these is the newest."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path

from lightning_parallel.checkpoint import directory
from lightning_parallel.checkpoint.contents import verified
from lightning_parallel.checkpoint.directory import TRAINER, PathLike


def is_whole(path: PathLike) -> bool:
    """Is the checkpoint complete? A directory must have all its files in full length, a file its closing table. Bytes
    that have changed are found only when they are read."""
    found = directory.find(Path(path))
    if found is None:
        return Path(path).is_file() and zipfile.is_zipfile(path)
    try:
        contents, wrong = verified(found)
        long_enough = all((found / name).stat().st_size >= size for name, size in contents["bytes"].items())
    except FileNotFoundError:  # such as one that another process is deleting
        return False
    # trainer.pt is written after contents.json, which hasn't its size.
    return wrong is None and long_enough and zipfile.is_zipfile(found / TRAINER)


def newest_in(
    folders: Collection[PathLike], but: PathLike | None = None, since: float | None = None
) -> Path | None:
    """The newest whole checkpoint in some folders, or None. Left out are ``but``, and those older than ``since``
    (seconds since the epoch)."""
    other = (path for path in found_in(folders) if but is None or path.resolve() != Path(but).resolve())
    recent = (path for path in other if since is None or saved_at(path) >= since * 1e9)
    return max(filter(is_whole, recent), key=saved_at, default=None)


def instead_of(path: Path) -> str:
    """The advice for an error about a checkpoint that isn't whole."""
    found = newest_in([path.parent], but=path)
    return "copy it again" + ("" if found is None else f", or use {found}, the newest whole checkpoint beside it")


def found_in(folders: Collection[PathLike]) -> set[Path]:
    """The checkpoints in some folders, whole or not."""
    found = {path for folder in folders for path in Path(folder).glob("*.ckpt")}
    # A crash while one was replaced may have left the old one alone. A directory opens under its own name.
    replaced = {old for folder in folders for old in Path(folder).glob(f"*.ckpt{directory.REPLACED}")}
    files = {old for old in replaced if old.is_file() and not old.with_suffix("").exists()}
    return found | files | {old.with_suffix("") for old in replaced if directory.find(old.with_suffix("")) == old}


def saved_at(path: Path) -> int:
    """When a checkpoint was saved: nanoseconds since the epoch, 0 if it has been deleted."""
    try:
        return (directory.find(path) or path).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
