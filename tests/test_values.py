"""values.py: what is said of values in errors."""

from __future__ import annotations

from lightning_parallel.values import first_few


def test_many_names_are_cut_short() -> None:
    assert first_few("abc") == "a, b, c"
    assert first_few("abcdefg") == "a, b, c, d, e, and 2 more"
