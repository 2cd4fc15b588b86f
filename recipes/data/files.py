"""The files of documents that ``data=hf`` reads. Imports neither torch nor datasets: asked before any worker starts."""

from __future__ import annotations

from pathlib import Path

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}  # suffix -> loader of datasets'


def files_of(path: Path | None) -> list[Path]:
    """The files of documents that a path stands for: itself, or those below a folder, sorted.

    Raises:
        ValueError: there are none, or of several kinds. It says what is wrong, and what helps, apart by a semicolon.
    """
    fix = f"give a file, or a folder with files, of one kind of {', '.join(KINDS)}"
    if path is None:
        raise ValueError(f"no file is given; {fix}")
    if not path.exists():
        raise ValueError(f"no such file or folder; {fix} (relative names count from {Path.cwd()})")
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    known = [file for file in found if file.suffix in KINDS and not _is_hidden(file.relative_to(path))]
    if not known:
        raise ValueError(f"no documents there; {fix}")
    chained = next((str(file) for file in known if "::" in str(file)), None)
    if chained is not None:
        raise ValueError(f"'::' in {chained} would be read as a chain of files; rename it")
    kinds = sorted({file.suffix for file in known})
    if len({KINDS[kind] for kind in kinds}) > 1:
        raise ValueError(f"files of several kinds, {', '.join(kinds)}; {fix}")
    return known


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
