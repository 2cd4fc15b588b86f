"""A byte-level language-model set made from the sources of Python's own standard library.

About 12 MB of real text that is on every machine. It varies with the Python release: the files' list is
hashed, and the hash names the cache and is part of the run's record.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.data.base import SeededData
from recipes.data.tokens import Tokens, TokenWindows

SPLITS = ("train", "val", "test")
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_END_OF_FILE = b"\0"


def source_files(root: Path) -> list[Path]:
    """The ``*.py`` files under ``root`` without tests and installed packages, relative to it, sorted."""

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and entry.name not in _LEFT_OUT:
                yield from walk(entry)
            elif entry.suffix == ".py" and entry.is_file():
                yield entry.relative_to(root)

    return list(walk(root))


def split_of(file: Path) -> str:
    """Which split a file belongs to, by a hash of its name: 90 % train, 5 % val, 5 % test."""
    bucket = hashlib.sha256(file.as_posix().encode()).digest()[0] % 20
    return {0: "val", 1: "test"}.get(bucket, "train")


def list_hash(root: Path, files: list[Path]) -> str:
    """Hash of the files' names and sizes and of the Python release: 12 hexadecimal digits."""
    digest = hashlib.sha256(platform.python_version().encode())
    for file in files:
        digest.update(f"\n{file.as_posix()} {(root / file).stat().st_size}".encode())
    return digest.hexdigest()[:12]


def build(directory: Path, root: Path | None = None) -> Path:
    """Makes the set below ``directory`` unless it is there; returns its folder.

    The folder holds ``<split>.bin`` and ``meta.json``.
    Safe when several processes call it at once: each writes a folder of its own and renames it, which
    succeeds for the first and tells the others that it is done.
    """
    root = root if root is not None else Path(sysconfig.get_path("stdlib"))
    files = source_files(root)
    key = list_hash(root, files)
    target = directory / f"stdlib-{key}"
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"stdlib-{key}.", dir=directory))
    try:
        content = hashlib.sha256()
        sizes = dict.fromkeys(SPLITS, 0)
        streams = {split: (scratch / f"{split}.bin").open("wb") for split in SPLITS}
        for file in files:
            text = (root / file).read_bytes() + _END_OF_FILE
            content.update(text)
            sizes[split_of(file)] += streams[split_of(file)].write(text)
        for stream in streams.values():
            stream.close()
        meta = {"files": len(files), "list": key, "content": content.hexdigest(), "bytes": sizes}
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        scratch.chmod(0o755)  # mkdtemp makes it private; a data folder may be shared
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


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
        build(self.directory)

    def setup(self, stage: str) -> None:
        folder = build(self.directory)  # where prepare_data ran on another host, it is made here too
        self._meta = json.loads((folder / "meta.json").read_text())

        def tokens(split: str) -> Tokens:
            return np.memmap(folder / f"{split}.bin", dtype=np.uint8, mode="r")

        self.train_set = TokenWindows(tokens("train"), self.context)
        self.val_set = TokenWindows(tokens("val"), self.context, self.val_windows)
        self.test_set = TokenWindows(tokens("test"), self.context, self.val_windows)

    @property
    def fingerprint(self) -> str:
        return f"stdlib sha256:{self._meta['content']}"
