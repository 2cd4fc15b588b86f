"""recipes/data/files.py: a path stands for the documents below it, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.data.documents import files_of, problem


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a")
    return folder


def test_a_folder_stands_for_its_documents_in_order(tmp_path: Path) -> None:
    made(tmp_path, "b.jsonl", "a/c.json", "notes.md", ".cache/d.jsonl")
    assert [str(file.relative_to(tmp_path)) for file in files_of(tmp_path)] == ["a/c.json", "b.jsonl"]
    assert files_of(tmp_path / "b.jsonl") == [tmp_path / "b.jsonl"]
    assert problem(str(tmp_path)) is None is problem(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(("names", "path", "said"), [
    ([], None, "no file is given"),
    ([], "nowhere", "no such file or folder"),
    (["a.md"], "", "no documents there"),
    (["a.md"], "a.md", "no documents there"),
    (["a.txt", "b.parquet"], "", "files of several kinds, .parquet, .txt"),
    (["a::b; c.txt"], "", "as a chain of files"),
])  # fmt: skip
def test_other_paths_are_told_with_what_helps(tmp_path: Path, names: list[str], path: str | None, said: str) -> None:
    found = problem(None if path is None else str(made(tmp_path, *names) / path))
    assert found is not None and said in found[0] and found[1].startswith("give ")
