"""Whether a text file can be trained on. Imports neither torch nor numpy: asked before any worker starts."""

from __future__ import annotations

from pathlib import Path

HELD_OUT = 20  # one part in so many at the end of the file for validation, and as much again for test


def smallest_file(context: int) -> int:
    """Bytes that a file needs so that each split holds a window of ``context`` and the byte after it."""
    return HELD_OUT * (context + 1)


def problem(path: str | None, context: int) -> tuple[str, str] | None:
    """What is wrong with a text file and how to put it right; None if it can be trained on."""
    if path is None:
        return "no file is given", "name a text file: data.path=FILE"
    file = Path(path)
    if not file.exists():
        return "no such file", f"give a file that exists (relative names count from {Path.cwd()})"
    if not file.is_file():
        return "not a file", "give one text file, e.g. the joined contents of a folder"
    size, needed = file.stat().st_size, smallest_file(context)
    if size == 0:
        return "the file is empty", "give a file with text in it"
    if size < needed:
        return f"the file has {size} bytes, too few for windows of {context}", (
            f"give at least {needed} bytes or a smaller data.context"
        )
    return None
