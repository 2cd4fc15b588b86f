"""A byte-level language-model set made from the sources of Python's own standard library."""

from __future__ import annotations

from pathlib import Path

from recipes.data import sources
from recipes.data.base import SeededData
from recipes.data.tokens import TokenWindows


class StdlibData(SeededData):
    """Windows of ``context`` bytes of the standard library's sources, split by file.

    Args:
        directory: where the prepared set is kept.
        context: bytes in a window.
        val_windows: windows of the validation and of the test set, evenly spaced; None: all.
        batch_size, workers, seed: see :class:`SeededData`.
    """

    def __init__(
        self,
        *,
        directory: str,
        context: int = 128,
        val_windows: int | None = 240,
        batch_size: int = 24,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed)
        self.directory = Path(directory)
        self.context = context
        self.val_windows = val_windows

    def prepare_data(self) -> None:
        sources.stdlib().build(self.directory)

    def setup(self, stage: str) -> None:
        folder = sources.stdlib().build(self.directory)  # where prepare_data ran on another host, it is made here too
        self._fingerprint = sources.stdlib().fingerprint(folder)
        train, val, test = (sources.tokens(folder, split) for split in sources.SPLITS)
        self.train_set = TokenWindows(train, self.context)
        self.val_set = TokenWindows(val, self.context, self.val_windows)
        self.test_set = TokenWindows(test, self.context, self.val_windows)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint
