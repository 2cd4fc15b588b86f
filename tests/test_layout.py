"""Which rank does what: every answer of a layout, and the groups that real processes make of it."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.layout import Axis, Groups, Layout, Size, make_groups
from tests.pool import WorkerPool

AXES: tuple[Axis, ...] = ("pipeline", "data", "tensor")
SHAPES = [(1, 1, 1), (4, 1, 1), (2, 2, 2), (3, 2, 1), (2, 1, 3), (1, 3, 2)]


def places(pipeline: int, data: int, tensor: int) -> list[Layout]:
    world = pipeline * data * tensor
    return [Layout.resolve(world, rank, pipeline=pipeline, data=data, tensor=tensor) for rank in range(world)]


def test_the_rank_order_is_the_docstrings_table() -> None:
    layouts = places(2, 2, 2)
    assert [place.stage for place in layouts] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [place.data_rank for place in layouts] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.tensor_rank for place in layouts] == [0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_stage_is_on_rank_0(shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    assert layouts[0].is_last_stage and layouts[-1].is_first_stage
    assert sum(place.is_last_stage for place in layouts) == sum(place.is_first_stage for place in layouts)
    assert layouts[0].rank_of(stage=shape[0] - 1, data=0, tensor=0) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_coordinate_and_a_rank_name_each_other(shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    coordinates = [(place.stage, place.data_rank, place.tensor_rank) for place in layouts]
    assert sorted(coordinates) == sorted(product(*map(range, shape)))
    for seen_from in layouts:
        for place, (stage, data, tensor) in zip(layouts, coordinates, strict=True):
            assert seen_from.rank_of(stage=stage, data=data, tensor=tensor) == place.rank
            assert seen_from.at(place.rank) == place
    assert len({place.coordinate for place in layouts}) == len(layouts)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_rank_of_is_not_told_is_as_on_this_rank(shape: tuple[int, int, int]) -> None:
    for place in places(*shape):
        assert place.rank_of() == place.rank
        assert place.at(place.rank_of(stage=0)).data_rank == place.data_rank
        assert place.at(place.rank_of(stage=0)).tensor_rank == place.tensor_rank


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", AXES)
def test_peers_are_a_partition_of_the_ranks_along_one_axis(axis: Axis, shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    for place in layouts:
        peers = place.peers(axis)
        assert place.rank in peers and len(peers) == getattr(place, axis)
        assert all(place.at(peer).peers(axis) == peers for peer in peers)
    stages = [layouts[0].at(rank).stage for rank in layouts[0].peers("pipeline")]
    assert stages == list(range(shape[0]))  # in the axis's order, not in that of ranks


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (6, {"pipeline": "auto"}, (6, 1, 1)),
        (6, {"pipeline": "auto", "data": 2}, (3, 2, 1)),
        (8, {"pipeline": 2, "data": "auto", "tensor": 2}, (2, 2, 2)),
        (8, {"tensor": "auto", "pipeline": 4}, (4, 1, 2)),
        (1, {"pipeline": "auto"}, (1, 1, 1)),
        # Two at once: the data axis gives way.
        (4, {"pipeline": "auto", "data": "auto"}, (4, 1, 1)),
        (4, {"tensor": "auto", "data": "auto", "pipeline": 2}, (2, 1, 2)),
    ],
)
def test_auto_takes_the_ranks_that_the_others_leave(
    world: int, sizes: dict[Axis, Size], expected: tuple[int, int, int]
) -> None:
    layout = Layout.resolve(world, **sizes)
    assert (layout.pipeline, layout.data, layout.tensor) == expected
    assert layout.world_size == world


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (4, {"pipeline": 3}, ["pipeline 3", "4 processes", "`devices`", "to 3,", "product is 4"]),
        (6, {"pipeline": 4, "data": "auto"}, ["pipeline 4", "6 processes", "a multiple of 4"]),
        (2, {"pipeline": 4}, ["pipeline 4", "2 processes", "to 4,"]),
        (8, {"pipeline": 2, "data": 2}, ["pipeline 2 x data 2 x tensor 1", "8 processes", "to 4,"]),
        (4, {"pipeline": 0}, ["pipeline", "0", "positive integer or 'auto'"]),
        (4, {"data": -1}, ["data", "-1", "positive integer"]),
        (4, {"tensor": 2.0}, ["tensor", "2.0", "positive integer"]),
        (4, {"pipeline": True}, ["pipeline", "True", "positive integer"]),
        (4, {"pipeline": "all"}, ["pipeline", "'all'", "'auto'"]),
        (4, {"pipeline": "auto", "tensor": "auto"}, ["pipeline and tensor", "'auto'", "give one of them a number"]),
    ],
)
def test_a_refusal_names_the_numbers_and_the_fix(world: int, sizes: dict[Axis, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        Layout.resolve(world, **sizes)
    for word in words:
        assert word in str(refusal.value)


def test_a_rank_is_described_by_what_tells_it_from_others() -> None:
    assert Layout(4, 1, 1, 0).describe(0) == "stage 3 (rank 0)"
    assert Layout(2, 2, 1, 0).describe(3) == "stage 0, replica 1 (rank 3)"
    assert Layout(2, 2, 2, 0).describe(7) == "stage 0, replica 1, shard 1 (rank 7)"


def sums_over_groups(pipeline: int, data: int, tensor: int) -> dict[str, Any]:
    """On each axis: the ranks that an all-reduce over this rank's group adds up; and what came over each link."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline=pipeline, data=data, tensor=tensor)
    groups = make_groups(layout, timedelta(seconds=30))
    found: dict[str, Any] = {}
    for axis in AXES:
        bits = torch.tensor(2**layout.rank)
        dist.all_reduce(bits, group=getattr(groups, axis))
        found[axis] = bits.item()
    found |= _over_the_links(layout, groups)
    links = (groups.forward_in, groups.forward_out, groups.backward_in, groups.backward_out)
    found["links"] = len({id(link) for link in links if link is not None})
    found["members"] = {axis: sorted(dist.get_process_group_ranks(getattr(groups, axis))) for axis in AXES}
    return found


def _over_the_links(layout: Layout, groups: Groups) -> dict[str, int | None]:
    """Both directions at once: were they one group, a message might be taken for one of the other kind."""
    work, received = [], {}
    for name, neighbour in (("forward", 1), ("backward", -1)):
        sends_to, receives_from = layout.stage + neighbour, layout.stage - neighbour
        group_out, group_in = getattr(groups, f"{name}_out"), getattr(groups, f"{name}_in")
        assert (group_out is not None) == (0 <= sends_to < layout.pipeline)
        assert (group_in is not None) == (0 <= receives_from < layout.pipeline)
        value = torch.tensor(100 * neighbour + layout.rank)
        buffer = torch.zeros((), dtype=torch.int64)
        if group_out is not None:
            work.append((dist.isend(value, layout.rank_of(stage=sends_to), group=group_out), value))
        if group_in is not None:
            work.append((dist.irecv(buffer, layout.rank_of(stage=receives_from), group=group_in), buffer))
        received[name] = buffer if group_in is not None else None
    for one, _ in work:
        assert one is not None
        one.wait()
    return {name: None if buffer is None else int(buffer) for name, buffer in received.items()}


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 1), (4, 1, 1)])
def test_groups_and_links_join_the_right_ranks(pool: WorkerPool, shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    for place, found in zip(layouts, pool.run(sums_over_groups, len(layouts), *shape), strict=True):
        for axis in AXES:
            assert found[axis] == sum(2**peer for peer in place.peers(axis)), axis
            assert found["members"][axis] == sorted(place.peers(axis))
        before = None if place.is_first_stage else place.rank_of(stage=place.stage - 1)
        after = None if place.is_last_stage else place.rank_of(stage=place.stage + 1)
        assert found["links"] == (place.pipeline > 1)  # gloo: one group, and one thread that polls, for all
        assert found["forward"] == (None if before is None else 100 + before)
        assert found["backward"] == (None if after is None else -100 + after)
