"""Directories that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from lightning_parallel.checkpoint import directory


class Crash(BaseException):
    """As if the machine had gone: nothing cleans up."""


def put(path: Path, content: str) -> None:
    new = directory.beside(path)
    directory.begin(path, new)
    (new / "file").write_text(content)
    directory.replace(new, path)


def content(path: Path) -> str | None:
    found = directory.find(path, ["file"])
    return None if found is None else (found / "file").read_text()


@pytest.mark.parametrize("name", ["rename", "fsync"])
@pytest.mark.parametrize("moment", range(4))
def test_a_crash_at_any_moment_leaves_one_whole_directory(tmp_path: Path, name: str, moment: int) -> None:
    path = tmp_path / "it[1]"
    put(path, "old")
    real, calls = getattr(os, name), 0

    def call(*arguments: object) -> None:
        nonlocal calls
        if calls == moment:
            raise Crash
        calls += 1
        real(*arguments)

    with mock.patch(f"os.{name}", call):
        try:
            put(path, "new")
        except Crash:
            crashed = True
        else:
            crashed = False
    assert content(path) in ({"old", "new"} if crashed else {"new"})
    put(path, "next")
    assert content(path) == "next" and os.listdir(tmp_path) == ["it[1]"]


def test_a_crash_while_the_old_one_is_deleted_shows_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "it"
    put(path, "old")
    with mock.patch("shutil.rmtree", side_effect=Crash), pytest.raises(Crash):
        put(path, "new")
    assert content(path) == "new"
    directory.remove(path)
    assert content(path) is None and os.listdir(tmp_path) == []


def test_a_directory_without_its_files_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    assert directory.find(tmp_path / "it", ["file"]) is None
    assert directory.find(tmp_path / "nothing", ["file"]) is None


def test_neighbours_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path / "it", "a")
    put(tmp_path / "item", "b")
    directory.remove(tmp_path / "it")
    assert content(tmp_path / "item") == "b"
