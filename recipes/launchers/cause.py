"""What went wrong in a run whose workers were started elsewhere, from what they have left in its folder."""

from __future__ import annotations

import re
from pathlib import Path

from recipes import record
from recipes.launchers.launcher import Failure


def first_failure(folder: Path) -> Failure | None:
    """The first error of a rank; None for none. A rank that only lost its connection to another one is left out."""
    files = sorted((folder / record.ERRORS).glob("rank-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    found = [_failure(folder, file) for file in files]
    return next((failure for failure in found if not failure.is_lost_connection), None)


def _failure(folder: Path, file: Path) -> Failure:
    rank, text = int(file.stem.removeprefix("rank-")), file.read_text()
    frames = text.rfind('\n  File "')
    said = re.search(r"^\S.*", text[frames + 1 :], re.MULTILINE | re.DOTALL)  # after the last frame's lines
    return Failure(rank, said[0].rstrip() if said else text, text, record.place(folder, rank))
