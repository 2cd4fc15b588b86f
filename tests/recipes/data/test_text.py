"""recipes/data/text.py: windows of bytes, of the standard library and of a user's own text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.data.base import HELD_OUT
from recipes.data.text import StdlibData, TextData, TokenWindows

SEQUENCE = np.arange(50, dtype=np.uint8)


def test_the_smallest_file_has_a_window_in_every_split(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for context in (1, 7, 128):
        file.write_bytes(b"x" * HELD_OUT * (context + 1))
        data = TextData(path=str(file), context=context, batch_size=1)
        data.setup("fit")
        assert min(len(data.val_set), len(data.test_set)) >= 1  # type: ignore[arg-type]
        file.write_bytes(b"x" * (HELD_OUT * (context + 1) - 1))
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


def test_targets_are_the_next_tokens_and_every_token_is_a_target_once() -> None:
    windows = TokenWindows(SEQUENCE, context=7)
    assert len(windows) == 7
    for tokens, targets in (windows[index] for index in range(len(windows))):
        assert tokens.dtype == torch.int64 and len(tokens) == 7
        assert torch.equal(targets, tokens + 1)
    assert torch.cat([windows[index][1] for index in range(7)]).tolist() == list(range(1, 50))


def test_a_limit_spaces_the_windows_evenly() -> None:
    windows = TokenWindows(SEQUENCE, context=7, limit=3)
    assert [windows[index][0][0].item() for index in range(len(windows))] == [0, 14, 28]
    assert len(TokenWindows(SEQUENCE, context=7, limit=100)) == 7


def test_a_sequence_without_a_window_is_refused() -> None:
    assert len(TokenWindows(SEQUENCE[:8], context=7)) == 1
    with pytest.raises(ValueError, match="7 tokens hold no window of 7"):
        TokenWindows(SEQUENCE[:7], context=7)


def test_the_real_library_gives_megabytes_of_text(tmp_path: Path) -> None:
    data = StdlibData(directory=str(tmp_path), val_windows=10)
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_set) > 30_000  # type: ignore[arg-type]
    assert len(data.val_set) == len(data.test_set) == 10  # type: ignore[arg-type]
    tokens, targets = next(iter(data.train_dataloader()))
    assert tokens.shape == targets.shape == (24, 128)
    assert 1 <= tokens.float().mean() <= 127  # ASCII for the most part
    assert data.fingerprint.startswith("stdlib sha256:")
