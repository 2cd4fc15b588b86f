"""Byte-level language-model sets, made from source files that come with Python or with torch.

Megabytes of real text without a download. They vary with the release of what brings them: the files' list is hashed,
and the hash names the cache and is part of the run's record.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "val", "test")
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Sources:
    """Some source files.

    Attributes:
        name: of the set.
        root: folder that they are below.
        suffix: of their names.
        left_out: names of folders, or paths below ``root``, that are not entered.
    """

    name: str
    root: Path
    suffix: str
    left_out: frozenset[str]

    def files(self) -> list[Path]:
        """Relative to the root, sorted."""

        def walk(folder: Path) -> Iterator[Path]:
            for entry in sorted(folder.iterdir()):
                path = entry.relative_to(self.root)
                if entry.is_dir() and not {entry.name, path.as_posix()} & self.left_out:
                    yield from walk(entry)
                elif entry.suffix == self.suffix and entry.is_file():
                    yield path

        return list(walk(self.root))

    def build(self, directory: Path) -> Path:
        """Make the set below ``directory`` unless it is there. Returns its folder, with ``<split>.bin`` and
        ``meta.json``.

        Safe when several processes call it at once: each writes a folder of its own and renames it, which succeeds for
        the first and tells the others that it is done.
        """
        files = self.files()
        key = list_hash(self.root, files)
        target = directory / f"{self.name}-{key}"
        if target.is_dir():
            return target
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{self.name}-{key}.", dir=directory))
        try:
            content = hashlib.sha256()
            sizes = dict.fromkeys(SPLITS, 0)
            streams = {split: (scratch / f"{split}.bin").open("wb") for split in SPLITS}
            for file in files:
                text = (self.root / file).read_bytes() + _END_OF_FILE
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

    def fingerprint(self, folder: Path) -> str:
        """What a run's record says of a set that :meth:`build` made."""
        return f"{self.name} sha256:{json.loads((folder / 'meta.json').read_text())['content']}"


def tokens(folder: Path, split: str) -> npt.NDArray[np.uint8]:
    """A split of a set that was made, a byte a token."""
    return np.memmap(folder / f"{split}.bin", dtype=np.uint8, mode="r")


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


def stdlib() -> Sources:
    """Python's own standard library, without its tests and installed packages: about 12 MB."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return Sources("stdlib", Path(sysconfig.get_path("stdlib")), ".py", frozenset(left_out))
