"""Directories that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import pydoc
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from lightning_parallel.checkpoint import directory


class Crash(BaseException):
    """As if the machine had gone: nothing cleans up."""


def put(path: Path, content: str) -> None:
    new = directory.begin(path)
    new.mkdir()
    for name in directory.FILES:
        (new / name).write_text(content)
    directory.replace(new, path)


def content(path: Path) -> str | None:
    found = directory.find(path)
    return None if found is None else (found / directory.TRAINER).read_text()


@pytest.mark.parametrize("name", ["os.rename", "os.replace", "os.fsync", "shutil.rmtree"])
@pytest.mark.parametrize("moment", range(4))
def test_a_crash_at_any_moment_leaves_one_whole_directory(tmp_path: Path, name: str, moment: int) -> None:
    path = tmp_path / "it[1]"
    put(path, "old")
    real, left = pydoc.locate(name), moment

    def call(*arguments: object, **options: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        real(*arguments, **options)  # type: ignore[operator]

    with mock.patch(name, call), contextlib.suppress(Crash):
        put(path, "new")
    assert content(path) in ({"old", "new"} if left < 0 and name != "shutil.rmtree" else {"new"})
    put(path, "next")
    assert content(path) == "next" and os.listdir(tmp_path) == ["it[1]"]


def put_file(path: Path, content: str) -> None:
    with directory.replacing(path) as new:
        new.write_text(content)


def crash_in(name: str, action: Callable[[], None]) -> None:
    with mock.patch(name, side_effect=Crash), pytest.raises(Crash):
        action()


@pytest.mark.parametrize("name", ["os.replace", "shutil.rmtree"])
def test_the_old_one_that_a_crash_has_left_alone_stays_until_a_new_one_is_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / "it"
    put(path, "old")
    crash_in("os.replace", lambda: put(path, "new"))
    path.mkdir()  # a save in the background takes the name
    assert content(path) == "old"
    with contextlib.suppress(Crash):
        crash_in(name, lambda: put(path, "newer"))
    assert content(path) in ("old", "newer")


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "it"
    put_file(path, "old")
    crash_in("os.replace", lambda: put_file(path, "new"))
    assert path.read_text() == "old"
    put_file(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("kind", ["a folder", "an empty folder", "a file", "a dangling link"])
def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "a file":
        path.write_text("old")
    elif kind == "a dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    if kind == "a folder":
        (path / "precious").touch()
        with pytest.raises(ValueError, match="it is a folder, and no checkpoint: it would be deleted"):
            put(path, "new")
        with pytest.raises(ValueError, match="it is a folder, and no checkpoint"), directory.replacing(path):
            raise AssertionError("not refused")
        assert os.listdir(path) == ["precious"] and os.listdir(tmp_path) == ["it"]
    else:
        put(path, "new")
        assert content(path) == "new" and os.listdir(tmp_path) == ["it"]


def test_what_is_replaced_or_removed_leaves_nothing_but_its_neighbours(tmp_path: Path) -> None:
    """Among them a copy that the user calls old."""
    (tmp_path / "it.old").write_text("mine")
    put(tmp_path / "item", "b")
    put(tmp_path / "it", "one")
    put(tmp_path / "it", "other")
    with mock.patch("shutil.rmtree", side_effect=Crash), pytest.raises(Crash):
        put(tmp_path / "it", "last")  # and the one before it is left
    (tmp_path / "it.tmp-12345678").mkdir()
    directory.remove(tmp_path / "it")
    assert sorted(os.listdir(tmp_path)) == ["it.old", "item"] and content(tmp_path / "item") == "b"
    directory.remove(tmp_path / "it")
