"""The pictures of the README can be drawn anew."""

from __future__ import annotations

from pathlib import Path

from recipes.gallery.pictures import draw


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    draw(tmp_path, stages=2)
    for name in ("gpipe.png", "async.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
