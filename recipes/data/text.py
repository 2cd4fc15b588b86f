"""Byte-level text: Python's own standard library, or a file of the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data import sources
from recipes.data.base import HELD_OUT, SeededData

Tokens = npt.NDArray[np.uint8]


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs ``(tokens, targets)``, int64 [context] each, the target being the next token.

    Windows do not overlap, but for the one token that is the last target of one and the first token of the next.

    Args:
        tokens: uint8 [length], usually memory-mapped; length > context.
        context: tokens in a window.
        limit: at most so many windows, evenly spaced over the whole sequence; None: all of them.
    """

    def __init__(self, tokens: Tokens, context: int, limit: int | None = None) -> None:
        self.tokens, self.context = tokens, context
        self.windows = (len(tokens) - 1) // context
        if self.windows < 1:
            raise ValueError(f"{len(tokens)} tokens hold no window of {context} and the token after it")
        self.count = min(self.windows, limit) if limit is not None else self.windows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.windows // self.count * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


class ByteData(SeededData):
    """Windows of ``context`` bytes. ``val_windows`` limits those of the validation and of the test set."""

    def __init__(
        self,
        *,
        context: int = 128,
        val_windows: int | None = 240,
        batch_size: int = 24,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed)
        self.context, self.val_windows = context, val_windows

    def _set(self, train: Tokens, val: Tokens, test: Tokens) -> None:
        self.train_set = TokenWindows(train, self.context)
        self.val_set = TokenWindows(val, self.context, self.val_windows)
        self.test_set = TokenWindows(test, self.context, self.val_windows)


class StdlibData(ByteData):
    """The standard library's sources, split by file. The prepared set is kept in ``directory``."""

    def __init__(self, *, directory: str, **windows: int) -> None:
        super().__init__(**windows)
        self.directory = Path(directory)

    def prepare_data(self) -> None:
        sources.stdlib().build(self.directory)

    def setup(self, stage: str) -> None:
        folder = sources.stdlib().build(self.directory)  # where prepare_data ran on another host, it is made here too
        self.fingerprint = sources.stdlib().fingerprint(folder)
        self._set(*(sources.tokens(folder, split) for split in sources.SPLITS))


class TextData(ByteData):
    """One text file: 90 % of it train, the next 5 % validation, the last 5 % test. It is memory-mapped.

    Raises:
        ValueError: the file is missing, empty or too short; names the setting and the fix.
    """

    def __init__(self, *, path: str | None, **windows: int) -> None:
        super().__init__(**windows)
        found = problem(path, self.context)
        if found is not None:
            raise ValueError(f"data.path={path}: {found[0]}; {found[1]}")
        self.path = Path(str(path))

    def setup(self, stage: str) -> None:
        tokens = np.memmap(self.path, dtype=np.uint8, mode="r")
        held_out = len(tokens) // HELD_OUT
        val, test = len(tokens) - 2 * held_out, len(tokens) - held_out
        self._set(tokens[:val], tokens[val:test], tokens[test:])
        with self.path.open("rb") as stream:
            self.fingerprint = f"{self.path.name} sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def problem(path: str | None, context: int) -> tuple[str, str] | None:
    """What is wrong with a text file and how to put it right; None if it can be trained on."""
    if path is None:
        return "no file is given", "name a text file: data.path=FILE"
    file = Path(path)
    if not file.exists():
        return "no such file", f"give a file that exists (relative names count from {Path.cwd()})"
    if not file.is_file():
        return "not a file", "give one text file, e.g. the joined contents of a folder"
    size, needed = file.stat().st_size, HELD_OUT * (context + 1)  # each split holds a window and the byte after it
    if size == 0:
        return "the file is empty", "give a file with text in it"
    if size < needed:
        what = f"the file has {size} bytes, too few for windows of {context}"
        return what, f"give at least {needed} bytes or a smaller data.context"
    return None
