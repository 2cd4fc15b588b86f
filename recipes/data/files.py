"""The files of documents that ``data=hf`` reads. Imports neither torch nor datasets: asked before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
    if not any(file.stat().st_size for file in files):
        return "nothing is in it", fix
    chained = next((file for file in files if "::" in str(file)), None)
    if chained is not None:
        return f"datasets would read {chained} as a chain of files", "give it a name without ::"
    return None


def damage(files: Iterable[Path]) -> str | None:
    """What is wrong in files that datasets couldn't read, with the file and the line; None if it isn't seen here."""
    for file in files:
        if file.suffix == ".parquet":
            content = file.read_bytes()
            if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
                return f"{file} is not whole: give the whole file."
            continue
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    text = line.decode("utf-8-sig")
                    if file.suffix == ".jsonl" and text.strip():
                        json.loads(text)
                except UnicodeDecodeError as error:
                    return f"{file}, line {number}: {error}: convert the file to UTF-8."
                except ValueError as error:
                    return f"{file}, line {number}: no JSON: {error}: mend the line, or leave it out."
    return None
