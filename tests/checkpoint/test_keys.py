"""A rank finds what belongs to its place, or to another place of its replica."""

from __future__ import annotations

import pytest

from lightning_parallel.checkpoint.keys import key_in, nearest

SAVED = ["pp0.dp0.tp0", "pp0.dp1.tp0", "pp1.dp0.tp0", "pp1.dp1.tp0"]


@pytest.mark.parametrize(("coordinate", "expected"), [
    ("pp1.dp1.tp0", "pp1.dp1.tp0"),
    ("pp2.dp1.tp0", "pp0.dp1.tp0"),
    ("pp0.dp0.tp1", "pp0.dp0.tp0"),
    ("pp0.dp2.tp0", None),
])  # fmt: skip
def test_generators_are_those_of_the_same_replica(coordinate: str, expected: str | None) -> None:
    found = {} if expected is None else {"torch": key_in(expected, "torch")}
    assert nearest(coordinate, [key_in(place, "torch") for place in SAVED]) == found
