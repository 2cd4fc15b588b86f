"""Is a file what was written? Found out before anything is changed, and told by the file's name.

torch writes zip archives, of which each record has a checksum that torch itself doesn't look at. A file of tensors is a
row of such archives, one for each tensor or box of it; ``.metadata`` says where each begins. That file has no checksum
of its own, so contents.json has it, and the sizes of files, by which a checkpoint that was cut short is known without
reading it::

    {"content": {"aliases": {"head.weight": "embedding.weight"}, "extra_state": [], "crc32": {".metadata": 123},
     "bytes": {".metadata": 2048, "__0_0.distcp": 400000}}, "crc32": 456}
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint import directory
from lightning_parallel.checkpoint.directory import METADATA, TRAINER

CONTENTS = "contents.json"


def is_whole(path: Path) -> bool:
    """Is there a checkpoint, not only a part of one? A directory has all files in their length, a file the table of its
    end. Bytes that have changed are found when they are read."""
    place = directory.find(path)
    if place is None:
        return path.is_file() and zipfile.is_zipfile(path)
    contents, wrong = _looked_at(place)
    files = ((place / name, size) for name, size in contents["bytes"].items())
    long_enough = all(file.is_file() and file.stat().st_size >= size for file, size in files)
    # trainer.pt is written after contents.json, which hasn't its size.
    return wrong is None and long_enough and zipfile.is_zipfile(place / TRAINER)


def newest_in(folders: Collection[Path], but: Path | None = None) -> Path | None:
    """The newest whole checkpoint in some folders, other than ``but``; None for none."""
    other = (path for path in _found_in(folders) if but is None or path.resolve() != but.resolve())
    return max(filter(is_whole, other), key=_saved_at, default=None)


def damaged_since(folders: Collection[Path], path: Path | None) -> list[Path]:
    """The checkpoints in some folders that are not whole, and newer than ``path``, if that is there."""
    since = _saved_at(path) if path is not None else 0
    return sorted(other for other in _found_in(folders) if _saved_at(other) > since and not is_whole(other))


def _found_in(folders: Collection[Path]) -> set[Path]:
    found = {path for folder in folders for path in folder.glob("*.ckpt")}
    # A crash while one was replaced may have left the old one alone. A directory opens under its own name.
    replaced = {old for folder in folders for old in folder.glob(f"*.ckpt{directory.REPLACED}")}
    files = {old for old in replaced if old.is_file() and not old.with_suffix("").exists()}
    return found | files | {old.with_suffix("") for old in replaced if directory.find(old.with_suffix("")) == old}


def _saved_at(path: Path) -> int:
    return (directory.find(path) or path).stat().st_mtime_ns


def damaged(checkpoint: Path, file: Path, reason: str) -> ValueError:
    """The error for a damaged file. It offers the newest whole checkpoint beside the damaged one.

    Args:
        checkpoint: a directory or a file.
        file: the same, or the file in it that is damaged.
        reason: such as "it is cut short".
    """
    newest = newest_in([checkpoint.parent], but=checkpoint)
    offer = "Copy it again" if newest is None else f"The newest whole checkpoint beside it is {newest}"
    return ValueError(f"{file} is damaged: {reason}. {offer}.")


def check_archive(checkpoint: Path, file: Path, start: int = 0, length: int | None = None) -> None:
    """Compare what torch has written with its checksums.

    Args:
        checkpoint: that the file belongs to.
        file: a zip archive, or a row of them.
        start: of the archive, in bytes.
        length: in bytes; None for all that follows.

    Raises:
        ValueError: the file is missing, cut short, no archive, or another than was written.
    """
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise damaged(checkpoint, file, "it is missing") from None
    if size < start + (length or 0):
        raise damaged(checkpoint, file, f"it is cut short, to {size} bytes")
    wrong: str | None = None
    with open(file, "rb") as whole:
        part: Any = _Part(whole, start, size - start if length is None else length)
        try:
            with zipfile.ZipFile(part) as archive:
                wrong = archive.testzip()
        except Exception as error:  # of whatever kind: it takes damaged bytes at their word, and so does torch
            raise damaged(checkpoint, file, "it is not, or no longer, what torch.save writes") from error
        try:
            part.seek(0)
            torch.load(part, map_location="meta", weights_only=True)  # its own reader needs more to be right
        except (pickle.UnpicklingError, NotImplementedError):
            pass  # other things than tensors, or tensors of a kind that "meta" doesn't know
        except Exception as error:
            raise damaged(checkpoint, file, "it is not, or no longer, what torch.save writes") from error
    if wrong is not None:
        raise damaged(checkpoint, file, "its bytes differ from those that were written")


class _Part(io.RawIOBase):
    """Some of a file's bytes, as a file."""

    def __init__(self, whole: io.BufferedReader, start: int, length: int) -> None:
        self._whole, self._start, self._length, self._position = whole, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._length - self._position))
        self._whole.seek(self._start + self._position)
        count = self._whole.readinto(view[:count])
        self._position += count
        return count


# -- contents.json -----------------------------------------------------------------------------------------------


def contents_of(folder: Path, aliases: Mapping[str, str], extra_state: Iterable[str] = ()) -> bytes:
    """What contents.json of a checkpoint says.

    Args:
        folder: in which the tensors have been written.
        aliases: the further names of tied tensors, with the name that each is saved under.
        extra_state: the names of what is in trainer.pt of the model.
    """
    content = {
        "aliases": dict(aliases),
        "extra_state": sorted(extra_state),
        "crc32": {METADATA: zlib.crc32((folder / METADATA).read_bytes())},
        "bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != CONTENTS},
    }
    return json.dumps({"content": content, "crc32": _crc32_of(content)}).encode()


def read_contents(folder: Path) -> dict[str, Any]:
    """The content of contents.json; an empty one's where there is none, as in earlier versions.

    Raises:
        ValueError: the file, or one of which it has a checksum, is damaged.
    """
    contents, wrong = _looked_at(folder)
    if wrong is not None:
        raise damaged(folder, *wrong)
    return contents


def _looked_at(folder: Path) -> tuple[dict[str, Any], tuple[Path, str] | None]:
    """The content of contents.json, and which file is damaged, with the reason."""
    path = folder / CONTENTS
    empty: dict[str, Any] = {"aliases": {}, "extra_state": [], "crc32": {}, "bytes": {}}
    if not path.exists():
        return empty, None
    try:
        parsed = json.loads(path.read_bytes())
        content, expected = parsed["content"], parsed["crc32"]
    except (ValueError, KeyError, TypeError):
        return empty, (path, "it is not what was written")
    others = "its bytes differ from those that were written"
    if _crc32_of(content) != expected:
        return empty, (path, others)
    for name, crc32 in content["crc32"].items():
        if zlib.crc32((folder / name).read_bytes()) != crc32:
            return empty, (folder / name, others)
    return empty | content, None


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
