"""contents.json: the tied names and extra state of a checkpoint's directory, and checksums and sizes of its other
files.

torch's ``.metadata`` has no checksum of its own, so it is here. The sizes of the other files show a checkpoint that was
cut short without reading it::

    {"content": {"aliases": {"head.weight": "embedding.weight"}, "extra_state": [], "crc32": {".metadata": 123},
     "bytes": {".metadata": 2048, "__0_0.distcp": 400000}}, "crc32": 456}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint.directory import METADATA

CONTENTS = "contents.json"
DIFFERS = "its bytes differ from those that were written"
NOT_WRITTEN = "it is not what was written"


def contents_of(folder: Path, aliases: Mapping[str, str], extra_state: Iterable[str] = ()) -> bytes:
    """The content of contents.json for a ``folder`` in which the tensors have been written.

    Args:
        aliases: the further names of tied tensors, with the name that each is saved under.
        extra_state: the names of what trainer.pt holds of the model.
    """
    content = {
        "aliases": dict(aliases),
        "extra_state": sorted(extra_state),
        "crc32": {METADATA: zlib.crc32((folder / METADATA).read_bytes())},
        "bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != CONTENTS},
    }
    return json.dumps({"content": content, "crc32": _crc32_of(content)}).encode()


def verified(folder: Path) -> tuple[dict[str, Any], tuple[Path, str] | None]:
    """The content of contents.json, and the damaged file with the reason: this one, or one that it has a checksum of.
    None if all are as they were written. The content is empty if a file is damaged, or if there is no contents.json, as
    in earlier versions."""
    path = folder / CONTENTS
    empty: dict[str, Any] = {"aliases": {}, "extra_state": [], "crc32": {}, "bytes": {}}
    if not path.exists():
        return empty, None
    try:
        parsed = json.loads(path.read_bytes())
        content, expected = parsed["content"], parsed["crc32"]
    except (ValueError, KeyError, TypeError):
        return empty, (path, NOT_WRITTEN)
    if _crc32_of(content) != expected:
        return empty, (path, DIFFERS)
    for name, crc32 in content["crc32"].items():
        if zlib.crc32((folder / name).read_bytes()) != crc32:
            return empty, (folder / name, DIFFERS)
    return empty | content, None


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
