"""The groups that real processes make of a layout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout, Placement
from lightning_parallel.schedules.actions import placement
from lightning_parallel.schedules.generators import SCHEDULES
from tests.pool import WorkerPool
from tests.ranks.test_layout import NAMES, places


def sums_over_groups(pipeline: int, data: int, tensor: int) -> dict[str, Any]:
    """On each axis: the ranks that an all-reduce over this rank's group adds up; and how many groups the links take."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline=pipeline, data=data, tensor=tensor)
    groups = Groups(layout, timedelta(seconds=30))
    found: dict[str, Any] = {}
    for axis in NAMES:
        bits = torch.tensor(2**layout.rank)
        dist.all_reduce(bits, group=groups.along(axis))
        found[axis] = bits.item()
    links = groups.links()
    assert groups.links() == links  # over the same groups
    wires = [*links.activations.values(), *links.gradients.values()]
    found["links"] = len({id(wire.group) for wire in wires})
    assert len({wire.tag for wire in wires}) == len(wires)
    found["members"] = {axis: sorted(dist.get_process_group_ranks(groups.along(axis))) for axis in NAMES}
    return found


@pytest.mark.parametrize("shape", [(2, 2, 1), (4, 1, 1)])
def test_groups_and_links_join_the_right_ranks(pool: WorkerPool, shape: tuple[int, int, int]) -> None:
    layouts = places(*shape)
    for place, found in zip(layouts, pool.run(sums_over_groups, len(layouts), *shape), strict=True):
        for axis in NAMES:
            assert found[axis] == sum(2**peer for peer in place.peers(axis)), axis
            assert found["members"][axis] == sorted(place.peers(axis))
        assert found["links"] == (place.stages > 1)  # gloo: one group, and one thread that polls, for all


def over_lanes(placements: list[Placement]) -> list[list[tuple[int, ...]]]:
    """As over NCCL, but on CPUs: for each wire of this rank its group's number and the two stages; what came over them,
    all at once, is checked."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    found = []
    with patch("lightning_parallel.ranks.groups.dist.get_backend", return_value="nccl"):
        groups = Groups(layout, timedelta(seconds=30), torch.device("cpu"))
        assert groups.host_group is not groups.along("pipeline")
        for places in placements:
            links = groups.links(places)
            work, wires = [], []
            for kind, by_cut in enumerate((links.activations, links.gradients)):
                for cut, wire in by_cut.items():
                    assert wire.host_group is groups.host_group
                    source, target = places[cut : cut + 2] if kind == 0 else places[cut : cut + 2][::-1]
                    value = torch.tensor([2 * cut + kind if layout.stage == source else -1])
                    post, there = (dist.isend, target) if layout.stage == source else (dist.irecv, source)
                    # No tag: order alone says what a message is.
                    work.append((post(value, layout.rank_at(pipeline=there), group=wire.group), value, 2 * cut + kind))
                    wires.append((id(wire.group), min(source, target), max(source, target)))
            for one, _, _ in reversed(work):
                assert one is not None
                one.wait()
            assert all(int(value) == expected for _, value, expected in work)
            numbers = {group: number for number, group in enumerate(dict.fromkeys(group for group, _, _ in wires))}
            found.append([(numbers[group], *pair) for group, *pair in wires])
    return found


def test_over_nccl_each_cut_and_kind_has_a_queue_of_its_own(pool: WorkerPool) -> None:
    """A group has one for each pair of ranks."""
    placements = [placement(SCHEDULES[name](4, 4)) for name in ("1f1b", "interleaved", "zbv")]
    for found in pool.run(over_lanes, 4, placements):
        assert all(len(set(wires)) == len(wires) for wires in found)
        assert [len({group for group, *_ in wires}) for wires in found] == [2, 4, 4]
