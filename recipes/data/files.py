"""The files of documents that ``data=hf`` reads. Imports neither torch nor datasets: asked before any worker starts."""

from __future__ import annotations

from pathlib import Path

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}  # suffix -> loader of datasets'


def files_of(path: Path) -> list[Path]:
    """The files of documents that a path stands for: itself, or those below a folder, sorted."""
    if path.is_file():
        return [path]
    inside = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in KINDS)
    return [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def problem(path: str | None) -> tuple[str, str] | None:
    """What is wrong with a path of documents and how to put it right; None if they can be read."""
    fix = f"give a file, or a folder with files, of one kind of {', '.join(KINDS)}"
    if path is None:
        return "no file is given", fix
    if not Path(path).exists():
        return "no such file or folder", f"{fix} (relative names count from {Path.cwd()})"
    files = files_of(Path(path))
    if not files or files[0].suffix not in KINDS:
        return "no documents there", fix
    suffixes = sorted({file.suffix for file in files})
    if len({KINDS[suffix] for suffix in suffixes}) > 1:
        return f"files of several kinds, {', '.join(suffixes)}", fix
    chained = next((file for file in files if "::" in str(file)), None)
    if chained is not None:
        return f"datasets would read {chained} as a chain of files", "give it a name without ::"
    return None
