"""recipes/data/sources.py: sets made of source files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from recipes.data import sources
from recipes.data.sources import Sources


@pytest.fixture
def library(tmp_path: Path) -> Sources:
    """A small source tree with what has to be left out."""
    root = tmp_path / "library"
    for number in range(60):
        file = root / ("a" if number % 2 else "b/c") / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = {number}\n" * (number + 1))
    for left_out in ("test/test_x.py", "a/tests/test_y.py", "site-packages/other.py", "a/data.txt", "b/left/x.py"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("left out\n")
    return Sources("library", root, ".py", frozenset({"test", "tests", "site-packages", "b/left"}))


def test_files_are_split_whole_and_none_is_lost(library: Sources, tmp_path: Path) -> None:
    folder = library.build(tmp_path / "data")
    files = library.files()
    assert len(files) == 60 and files == sorted(files)
    for split in sources.SPLITS:
        mine = [(library.root / file).read_bytes() for file in files if sources.split_of(file) == split]
        assert mine and (folder / f"{split}.bin").read_bytes() == b"".join(text + b"\0" for text in mine)


def test_a_changed_list_of_files_makes_another_set(library: Sources, tmp_path: Path) -> None:
    first = library.build(tmp_path / "data")
    assert library.build(tmp_path / "data") == first
    (library.root / "new.py").write_text("x = 1\n")
    second = library.build(tmp_path / "data")
    assert second != first
    assert json.loads((second / "meta.json").read_text())["files"] == 61


def test_several_processes_may_build_it_at_once(
    library: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Barrier(4)
    listed = sources.list_hash

    def all_past_the_check(root: Path, files: list[Path]) -> str:
        key = listed(root, files)
        start.wait()
        return key

    monkeypatch.setattr(sources, "list_hash", all_past_the_check)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(library.build(tmp_path / "data"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == [found[0].name]
    assert {file.name for file in found[0].iterdir()} == {"train.bin", "val.bin", "test.bin", "meta.json"}
