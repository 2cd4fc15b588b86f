"""Which rank does what: every answer that a layout gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_parallel.ranks.layout import Layout, Size

NAMES = ("pipeline", "data", "tensor")


def test_the_rank_order_is_the_docstrings_table() -> None:
    layouts = Layout.resolve(12, pipeline=2, data=3, tensor=2).everyone()
    coordinates = [tuple(place.index(name) for name in NAMES) for place in layouts]
    assert coordinates == [*product([1, 0], range(3), range(2))]
    for seen_from, (rank, (stage, data, tensor)) in product(layouts, enumerate(coordinates)):
        assert seen_from.rank_at(pipeline=stage, data=data, tensor=tensor) == rank
    # In the axis's order, not in that of ranks. What isn't given is as on this rank.
    assert [layouts[3].peers(name) for name in NAMES] == [[9, 3], [1, 3, 5], [2, 3]]
    # Ranks that hold one copy of the model differ on the axes that split it.
    assert [place.model_peers() for place in layouts[::2]] == 2 * [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert layouts[3].coordinate == "pp1.dp1.tp1"
    assert layouts[3].describe(11) == "stage 0, replica 2, shard 1 (rank 11)"
    assert Layout.resolve(4, data=4).describe(3) == "stage 0, replica 3 (rank 3)"


@pytest.mark.parametrize(("world", "sizes", "expected"), [
    (6, {"pipeline": "auto", "data": 2}, (3, 2, 1)),
    (8, {"pipeline": 2, "data": "auto", "tensor": 2}, (2, 2, 2)),
    (1, {"pipeline": "auto"}, (1, 1, 1)),
    (4, {"tensor": "auto", "data": "auto", "pipeline": 2}, (2, 1, 2)),  # two at once: the data axis gives way
])  # fmt: skip
def test_auto_takes_the_ranks_that_the_others_leave(
    world: int, sizes: dict[str, Size], expected: tuple[int, int, int]
) -> None:
    assert tuple(Layout.resolve(world, **sizes).size(axis) for axis in NAMES) == expected


@pytest.mark.parametrize(("world", "sizes", "words"), [
    (6, {"pipeline": 4, "data": "auto"}, ["stages=4", "6 processes", "a multiple of 4"]),
    (8, {"pipeline": 2, "data": 2}, ["stages=2 x data_parallel=2 x tensor_parallel=1", "8 processes", "`devices`"]),
    (4, {"pipeline": 0}, ["pipeline", "0", "positive integer or 'auto'"]),
    (4, {"pipeline": True}, ["pipeline", "True", "positive integer"]),
    (4, {"pipeline": "all"}, ["pipeline", "'all'", "'auto'"]),
    (4, {"pipeline": "auto", "tensor": "auto"}, ["stages and tensor_parallel", "'auto'", "give one of them"]),
])  # fmt: skip
def test_a_refusal_names_the_numbers_and_the_fix(world: int, sizes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        Layout.resolve(world, **sizes)
    assert all(word in str(refusal.value) for word in words)
