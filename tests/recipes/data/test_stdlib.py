"""recipes/data/stdlib.py: the set made of the standard library's sources."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from recipes.data import stdlib


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small source tree with what has to be left out."""
    root = tmp_path / "library"
    for number in range(60):
        file = root / ("a" if number % 2 else "b/c") / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = {number}\n" * (number + 1))
    for left_out in ("test/test_x.py", "a/tests/test_y.py", "site-packages/other.py", "a/data.txt"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("left out\n")
    return root


def test_files_are_split_whole_and_none_is_lost(library: Path, tmp_path: Path) -> None:
    folder = stdlib.build(tmp_path / "data", library)
    files = stdlib.source_files(library)
    assert len(files) == 60 and files == sorted(files)
    for split in stdlib.SPLITS:
        mine = [(library / file).read_bytes() for file in files if stdlib.split_of(file) == split]
        assert mine and (folder / f"{split}.bin").read_bytes() == b"".join(text + b"\0" for text in mine)


def test_a_changed_list_of_files_makes_another_set(library: Path, tmp_path: Path) -> None:
    first = stdlib.build(tmp_path / "data", library)
    assert stdlib.build(tmp_path / "data", library) == first
    (library / "new.py").write_text("x = 1\n")
    second = stdlib.build(tmp_path / "data", library)
    assert second != first
    assert json.loads((second / "meta.json").read_text())["files"] == 61


def test_several_processes_may_build_it_at_once(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Barrier(4)
    listed = stdlib.list_hash

    def all_past_the_check(root: Path, files: list[Path]) -> str:
        key = listed(root, files)
        start.wait()
        return key

    monkeypatch.setattr(stdlib, "list_hash", all_past_the_check)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(stdlib.build(tmp_path / "data", library))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == [found[0].name]
    assert {file.name for file in found[0].iterdir()} == {"train.bin", "val.bin", "test.bin", "meta.json"}


def test_the_real_library_gives_megabytes_of_text(tmp_path: Path) -> None:
    data = stdlib.StdlibData(directory=str(tmp_path), val_windows=10)
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_set) > 30_000  # type: ignore[arg-type]
    assert len(data.val_set) == len(data.test_set) == 10  # type: ignore[arg-type]
    tokens, targets = next(iter(data.train_dataloader()))
    assert tokens.shape == targets.shape == (24, 128)
    assert 1 <= tokens.float().mean() <= 127  # ASCII for the most part
    assert data.fingerprint.startswith("stdlib sha256:")
