"""recipes/data/text.py and textfile.py: a user's own text."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.data.text import TextData
from recipes.data.textfile import smallest_file


def test_the_smallest_file_has_a_window_in_every_split(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for context in (1, 7, 128):
        file.write_bytes(b"x" * smallest_file(context))
        data = TextData(path=str(file), context=context, batch_size=1)
        data.setup("fit")
        assert min(len(data.val_set), len(data.test_set)) >= 1  # type: ignore[arg-type]
        file.write_bytes(b"x" * (smallest_file(context) - 1))
        with pytest.raises(ValueError, match=rf"too few for windows of {context}; give at least"):
            TextData(path=str(file), context=context)


def test_splits_do_not_overlap(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    data = TextData(path=str(file), context=3, batch_size=1)
    data.setup("fit")
    splits = [data.train_set, data.val_set, data.test_set]
    seen = [{int(token) for index in range(len(s)) for token in s[index][1]} for s in splits]  # type: ignore
    assert max(seen[0]) < 90 <= min(seen[1]) and max(seen[1]) < 95 <= min(seen[2])


@pytest.mark.parametrize("path", [None, "/no/such/file"])
def test_a_missing_file_is_refused_with_the_setting(path: str | None) -> None:
    with pytest.raises(ValueError, match=f"data.path={path}: no "):
        TextData(path=path)
