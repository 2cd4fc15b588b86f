"""Which rank does what: every answer that a layout gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_parallel.ranks.layout import Layout, Size

NAMES = ("pipeline", "data", "tensor")
SHAPES = [(4, 1, 1), (2, 2, 2), (1, 3, 2)]


def places(pipeline: int, data: int, tensor: int) -> list[Layout]:
    world = pipeline * data * tensor
    return [Layout.resolve(world, rank, pipeline=pipeline, data=data, tensor=tensor) for rank in range(world)]


def test_the_rank_order_is_the_docstrings_table() -> None:
    layouts = places(2, 2, 2)
    assert [place.stage for place in layouts] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [place.index("data") for place in layouts] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.index("tensor") for place in layouts] == [0, 1, 0, 1, 0, 1, 0, 1]
    # Ranks that hold one copy of the model differ on the axes that split it.
    assert [place.model_peers() for place in layouts] == 2 * (2 * [[0, 1, 4, 5]] + 2 * [[2, 3, 6, 7]])
    assert layouts[7].describe(7) == "stage 0, replica 1, shard 1 (rank 7)"
    assert Layout.resolve(4, pipeline=2, data=2).describe(3) == "stage 0, replica 1 (rank 3)"
    assert Layout.resolve(4, data=4).describe(3) == "stage 0, replica 3 (rank 3)"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_coordinate_and_a_rank_name_each_other_and_peers_differ_along_one_axis(shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    coordinates = [(place.stage, place.index("data"), place.index("tensor")) for place in layouts]
    assert coordinates[0] == (shape[0] - 1, 0, 0) and layouts[-1].stage == 0  # the last stage is on rank 0
    assert sorted(coordinates) == sorted(product(*map(range, shape)))
    for seen_from, (_, own_data, own_tensor) in zip(layouts, coordinates, strict=True):
        assert seen_from.rank_at() == seen_from.rank
        for place, (stage, data, tensor) in zip(layouts, coordinates, strict=True):
            assert seen_from.rank_at(pipeline=stage, data=data, tensor=tensor) == place.rank
            assert seen_from.at(place.rank) == place
            if (data, tensor) == (own_data, own_tensor):  # what it is not told is as on this rank
                assert seen_from.rank_at(pipeline=stage) == place.rank
        for axis in NAMES:
            peers = seen_from.peers(axis)
            assert seen_from.rank in peers and len(peers) == seen_from.size(axis)
            assert all(seen_from.at(peer).peers(axis) == peers for peer in peers)
    assert len({place.coordinate for place in layouts}) == len(layouts)
    stages = [layouts[0].at(rank).stage for rank in layouts[0].peers("pipeline")]
    assert stages == list(range(shape[0]))  # in the axis's order, not in that of ranks


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
