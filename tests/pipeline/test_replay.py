"""A number that comes from the batch is a number like others to the user's code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_parallel.pipeline.replay import Known


@pytest.fixture
def three() -> Any:
    return Known.of(3, SimpleNamespace(is_open=True), lambda registers: 3, frozenset())  # type: ignore[arg-type]


def test_it_counts_for_lists_and_texts(three: Any) -> None:
    assert [None] * three == three * [None] == [None] * 3
    assert "ab" * three == "ababab"
    assert (0,) * three == (0, 0, 0)


def test_it_is_calculated_with(three: Any) -> None:
    assert [three + 1, 1 + three, three - 1, 1 - three, 2 * three, three // 2, 7 // three, -three] == [
        4, 4, 2, -2, 6, 1, 2, -3,
    ]  # fmt: skip
    assert (three * 0.5, 0.5 * three, three / 2) == (1.5, 1.5, 1.5)
    with pytest.raises(TypeError):
        three + "a"
