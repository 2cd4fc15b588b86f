"""Checkpoints on a disk: directories and files that are replaced as a whole, and which of them are whole.

A crash at any moment leaves the old one or the new one. The new one is written to the name that :func:`begin` gives,
and :func:`replace` moves it to its place. In between, the old one is at ``<path>.replaced``, where :func:`find` looks.

contents.json in a directory has the tied names and the extra state, and what shows a damage without reading the
tensors: sizes of the other files, and a checksum of torch's ``.metadata``, which has none of its own::

    {"content": {"aliases": {"head.weight": "embedding.weight"}, "extra_state": [], "crc32": {".metadata": 123},
     "bytes": {".metadata": 2048, "__0_0.distcp": 400000}}, "crc32": 456}

All else is in zip archives that ``torch.save`` has written. Each record has a checksum, which torch doesn't read. A
file of tensors is a row of such archives, one for each tensor or box of it; ``.metadata`` says where each begins.
"""

from __future__ import annotations

import glob
import io
import json
import os
import pickle
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

PathLike = str | os.PathLike[str]

METADATA = ".metadata"
TRAINER = "trainer.pt"
CONTENTS = "contents.json"
FILES = (METADATA, TRAINER)  # one that has both is finished: they are written last
_REPLACED = ".replaced"

# -- replaced as a whole -----------------------------------------------------------------------------------------


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
    """Write a directory or a file to disk, and move it to its place so that it survives a crash."""
    for written in (*(new.iterdir() if new.is_dir() else ()), new):
        _sync(written)
    if path.is_dir() or new.is_dir():
        _move_away(path)
    os.replace(new, path)  # of a file by a file: at once
    _sync(path.parent)
    delete(_old(path))


def _move_away(path: Path) -> None:
    """Move what is at the path, if anything, to where :func:`find` looks."""
    if find(path) == _old(path):  # all that a crash has left: at ``path`` is nothing, or an empty folder
        delete(path)
    elif os.path.lexists(path):
        delete(_old(path))
        os.rename(path, _old(path))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name that :func:`begin` gives, to write a file to. If there is no error, it replaces what is at ``path``."""
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


def is_checkpoint(path: PathLike) -> bool:
    """Is there a finished directory, which can be loaded from ``path``?"""
    return find(Path(path)) is not None


def remove(path: PathLike) -> None:
    """Delete a checkpoint, and what crashes may have left of it. A crash never leaves half of it at ``path``. One rank
    calls it."""
    path = Path(path)
    if os.path.lexists(path):
        os.rename(path, _beside(path))
    delete(_old(path))
    _delete_unfinished(path)


def delete(path: Path) -> None:
    """Delete a file or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Write the content of a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def _old(path: Path) -> Path:
    return path.with_name(path.name + _REPLACED)


def _delete_unfinished(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
        delete(left)


# -- contents.json -----------------------------------------------------------------------------------------------


def contents_of(folder: Path, aliases: Mapping[str, str], extra_state: Iterable[str] = ()) -> bytes:
    """The content of contents.json for a ``folder`` in which the tensors have been written: ``aliases`` are the further
    names of tied tensors, with the name that each is saved under, ``extra_state`` what trainer.pt holds of the model.
    """
    content = {
        "aliases": dict(aliases),
        "extra_state": sorted(extra_state),
        "crc32": {METADATA: zlib.crc32((folder / METADATA).read_bytes())},
        "bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != CONTENTS},
    }
    return json.dumps({"content": content, "crc32": _crc32_of(content)}).encode()


def verified(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """The content of contents.json, and the damaged file: this one, of which the content is empty, or the metadata."""
    try:
        parsed = json.loads((folder / CONTENTS).read_bytes())
        content: dict[str, Any] = parsed["content"]
        if parsed["crc32"] != _crc32_of(content):
            return {}, folder / CONTENTS
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}, folder / CONTENTS
    is_whole = zlib.crc32((folder / METADATA).read_bytes()) == content["crc32"][METADATA]
    return content, None if is_whole else folder / METADATA


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# -- the checkpoints in a folder ---------------------------------------------------------------------------------


def is_whole(path: PathLike) -> bool:
    """Is the checkpoint complete? A directory must have all its files in full length, a file its closing table. Bytes
    that have changed are found only when they are read."""
    found = find(Path(path))
    if found is None:
        return Path(path).is_file() and zipfile.is_zipfile(path)
    try:
        contents, wrong = verified(found)
        # trainer.pt is written after contents.json, which hasn't its size.
        return (
            wrong is None
            and all((found / name).stat().st_size >= size for name, size in contents["bytes"].items())
            and zipfile.is_zipfile(found / TRAINER)
        )
    except FileNotFoundError:  # such as one that another process is deleting
        return False


def newest_in(folders: Collection[PathLike], but: PathLike | None = None, since: float | None = None) -> Path | None:
    """The newest whole checkpoint in some folders, or None. Left out are ``but``, and those older than ``since``
    (seconds since the epoch)."""
    other = (path for path in found_in(folders) if but is None or path.resolve() != Path(but).resolve())
    recent = (path for path in other if since is None or saved_at(path) >= since * 1e9)
    return max(filter(is_whole, recent), key=saved_at, default=None)


def found_in(folders: Collection[PathLike]) -> set[Path]:
    """The checkpoints in some folders, whole or not."""
    found = {path for folder in folders for path in Path(folder).glob("*.ckpt")}
    # A crash while one was replaced may have left the old one alone. A directory opens under its own name.
    replaced = {old for folder in folders for old in Path(folder).glob(f"*.ckpt{_REPLACED}")}
    files = {old for old in replaced if old.is_file() and not old.with_suffix("").exists()}
    return found | files | {old.with_suffix("") for old in replaced if find(old.with_suffix("")) == old}


def saved_at(path: Path) -> int:
    """When a checkpoint was saved: nanoseconds since the epoch, 0 if it has been deleted."""
    try:
        return (find(path) or path).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def instead_of(path: Path) -> str:
    """The advice for an error about a checkpoint that isn't whole."""
    found = newest_in([path.parent], but=path)
    return "copy it again" + ("" if found is None else f", or use {found}, the newest whole checkpoint beside it")


# -- a file --------------------------------------------------------------------------------------------------------


def damaged(checkpoint: Path, file: Path, reason: str = "it is not, or no longer, what was written") -> ValueError:
    """The error for a damaged ``file`` of a ``checkpoint`` (the same if that is a file). It offers the newest whole
    checkpoint beside the damaged one."""
    advice = instead_of(checkpoint)
    return ValueError(f"{file} is damaged: {reason}. {advice[0].upper()}{advice[1:]}.")


def check_archive(checkpoint: Path, file: Path, start: int = 0, length: int | None = None) -> None:
    """Compare the records of an archive with their checksums. It is the whole file, or ``length`` bytes of it from byte
    ``start`` on.

    Raises:
        ValueError: the file is missing, cut short, no archive, or another than was written.
    """
    if not file.is_file():
        raise damaged(checkpoint, file, "it is missing")
    if file.stat().st_size < start + (length or 0):
        raise damaged(checkpoint, file, "it is cut short")
    with open(file, "rb") as whole:
        whole.seek(start)
        part = whole if length is None else io.BytesIO(whole.read(length))
        try:
            with zipfile.ZipFile(part) as archive:
                wrong = archive.testzip()
            part.seek(0)
            # torch's own reader needs more to be right. Suppressed: other things than tensors, and tensors of a kind
            # that "meta" doesn't know.
            with suppress(pickle.UnpicklingError, NotImplementedError):
                torch.load(part, map_location="meta", weights_only=True)
        except Exception as error:  # of whatever kind: both take damaged bytes at their word
            raise damaged(checkpoint, file) from error
    if wrong is not None:
        raise damaged(checkpoint, file)
