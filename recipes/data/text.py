"""The user's own text file, as bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from recipes.data.base import SeededData
from recipes.data.textfile import HELD_OUT, problem
from recipes.data.tokens import TokenWindows


class TextData(SeededData):
    """Windows of ``context`` bytes of one file: 90 % of it train, the next 5 % validation, the last 5 % test.

    Args:
        path: the file. It is memory-mapped, so it may be larger than memory.
        context, val_windows, batch_size, workers, seed: as for the standard library's set.

    Raises:
        ValueError: the file is missing, empty or too short; names the setting and the fix.
    """

    def __init__(
        self,
        *,
        path: str | None,
        context: int = 128,
        val_windows: int | None = 240,
        batch_size: int = 24,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed)
        found = problem(path, context)
        if found is not None:
            raise ValueError(f"data.path={path}: {found[0]}; {found[1]}")
        assert path is not None
        self.path = Path(path)
        self.context = context
        self.val_windows = val_windows

    def setup(self, stage: str) -> None:
        tokens = np.memmap(self.path, dtype=np.uint8, mode="r")
        held_out = len(tokens) // HELD_OUT
        val, test = len(tokens) - 2 * held_out, len(tokens) - held_out
        self.train_set = TokenWindows(tokens[:val], self.context)
        self.val_set = TokenWindows(tokens[val:test], self.context, self.val_windows)
        self.test_set = TokenWindows(tokens[test:], self.context, self.val_windows)

    @property
    def fingerprint(self) -> str:
        with self.path.open("rb") as stream:
            return f"{self.path.name} sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
