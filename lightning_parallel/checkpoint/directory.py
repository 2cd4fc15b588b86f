"""Directories, and files, that are replaced as a whole: a crash at any moment leaves the old one or the new one.

The new one is written to the name that :func:`begin` gives, and :func:`replace` moves it to its place. In between, the
old one is at ``<path>.replaced``, where :func:`find` looks too.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PathLike = str | os.PathLike[str]

METADATA = ".metadata"
TRAINER = "trainer.pt"
REPLACED = ".replaced"
FILES = (METADATA, TRAINER)  # one that has both is finished: they are written last


def begin(path: Path) -> Path:
    """A fresh name next to ``path`` for what is to replace it. What crashes have left under such names is deleted.

    Raises:
        ValueError: at ``path`` is a folder that is neither empty nor a checkpoint. It would be lost.
    """
    is_folder = path.is_dir() and not path.is_symlink() and any(path.iterdir())
    if is_folder and not any((path / name).exists() for name in FILES):
        raise ValueError(f"{path} is a folder, and no checkpoint: it would be deleted. Give another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_unfinished(path)
    return _beside(path)


def replace(new: Path, path: Path) -> None:
    """Move a directory or a file to its place so that it survives a crash. Its content is on the disk already."""
    _sync(new)
    if path.is_dir() or new.is_dir():
        _move_away(path)
    os.replace(new, path)  # of a file by a file: at once
    _sync(path.parent)
    delete(_old(path))


def _move_away(path: Path) -> None:
    """Move what is at the path, if anything, to where :func:`find` looks."""
    if find(path) == _old(path):  # a crash has left it alone: at ``path`` is nothing, or a name that was taken
        delete(path)
    elif os.path.lexists(path):
        delete(_old(path))
        os.rename(path, _old(path))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file to, which replaces the file or the checkpoint at ``path`` if there is no error.

    Raises:
        ValueError: at ``path`` is a folder of something else.
    """
    new = begin(path)
    try:
        yield new
        replace(new, path)
    finally:
        delete(new)


def find(path: Path) -> Path | None:
    """The finished directory: ``path``, or where :func:`replace` left the old one; None for neither."""
    for place in () if path.is_file() else (path, _old(path)):
        if all((place / name).is_file() for name in FILES):
            return place
    return None


def remove(path: Path) -> None:
    """Delete a directory, and what crashes may have left of it. A crash never leaves half of it at ``path``."""
    if os.path.lexists(path):
        os.rename(path, _beside(path))
    delete(_old(path))
    _delete_unfinished(path)


def take_name(path: Path, *, as_folder: bool) -> bool:
    """Make an empty folder or file for a coming checkpoint, if nothing is there."""
    with suppress(OSError):  # the save itself will raise what is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if as_folder else path.touch(exist_ok=False)
        return True
    return False


def give_back_name(path: Path) -> None:
    """Delete what :func:`take_name` has made, while it is empty."""
    with suppress(OSError):
        if path.is_dir():
            path.rmdir()
        elif path.stat().st_size == 0:
            path.unlink()


def delete(path: Path) -> None:
    """Delete a file or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Write the names in a directory to disk, as fsync does with the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def _old(path: Path) -> Path:
    return path.with_name(path.name + REPLACED)


def _delete_unfinished(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
        delete(left)
