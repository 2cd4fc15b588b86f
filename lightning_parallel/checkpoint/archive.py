"""Checks that a file is what ``torch.save`` has written, before anything is changed. Errors name the file.

torch writes zip archives. Each record has a checksum, which torch itself doesn't read. A file of tensors is a row of
such archives, one for each tensor or box of it; ``.metadata`` says where each begins.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint.contents import DIFFERS
from lightning_parallel.checkpoint.newest import instead_of


def damaged(checkpoint: Path, file: Path, reason: str) -> ValueError:
    """The error for a damaged ``file`` of a ``checkpoint`` (the same if that is a file). ``reason`` says what is wrong,
    such as "it is cut short". The error offers the newest whole checkpoint beside the damaged one."""
    advice = instead_of(checkpoint)
    return ValueError(f"{file} is damaged: {reason}. {advice[0].upper()}{advice[1:]}.")


def check_archive(checkpoint: Path, file: Path, start: int = 0, length: int | None = None) -> None:
    """Compare the records of a zip archive, or of a row of them, with their checksums. The archive begins at byte
    ``start`` of the file, and is ``length`` bytes long; None: it ends with the file.

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
        raise damaged(checkpoint, file, DIFFERS)


class _Part(io.RawIOBase):
    """A range of a file's bytes, as a file of its own."""

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
