"""recipes/data/stdlib.py: the set made of the standard library's sources."""

from __future__ import annotations

from pathlib import Path

from recipes.data import stdlib


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
