"""recipes/data/tokens.py: windows of a token sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.data.tokens import TokenWindows

SEQUENCE = np.arange(50, dtype=np.uint8)


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
