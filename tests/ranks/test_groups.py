"""The groups that real processes make of a layout."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout, Placement
from lightning_parallel.schedules.actions import placement
from lightning_parallel.schedules.named import SCHEDULES
from tools.workers.pool import WorkerPool


def over_lanes(placements: list[Placement]) -> list[list[tuple[int, ...]]]:
    """As over NCCL, but on CPUs: for each wire of this rank its group's number and the two stages; what came over them,
    all at once, is checked."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    over_gloo, found = Groups(layout, timedelta(seconds=30)), []
    for places in placements:  # all share one group, and one thread that polls
        links = over_gloo.wires(places)
        shared = [*links.activations.values(), *links.gradients.values()]
        assert len({wire.tag for wire in shared}) == len(shared) and len({id(wire.group) for wire in shared}) == 1
    with patch("lightning_parallel.ranks.groups.dist.get_backend", return_value="nccl"):
        groups = Groups(layout, timedelta(seconds=30), torch.device("cpu"))
        assert groups.host_group is not groups.along("pipeline")
        for places in placements:
            links = groups.wires(places)
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


def test_each_cut_and_kind_has_a_tag_of_its_own_and_over_nccl_a_queue(pool: WorkerPool) -> None:
    """A group has one for each pair of ranks."""
    placements = [placement(SCHEDULES[name](4, 4)) for name in ("1f1b", "interleaved", "zbv")]
    for found in pool.run(over_lanes, 4, placements):
        assert all(len(set(wires)) == len(wires) for wires in found)
        assert [len({group for group, *_ in wires}) for wires in found] == [2, 4, 4]


def met(places: Placement) -> tuple[list[tuple[int, int]], list[int]]:
    """Who sends whom a first message, in this rank's order; and the sizes of the groups that NCCL would connect."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    found, sizes = list[tuple[int, int]](), list[int]()
    with (
        patch("lightning_parallel.ranks.groups.dist.get_backend", return_value="nccl"),
        patch.object(Groups, "_greet", lambda self, group, *ends: found.append(ends)),
        patch.object(dist, "all_reduce", lambda tensor, *op, group: sizes.append(dist.get_world_size(group))),
    ):
        Groups(layout, timedelta(seconds=30), torch.device("cpu")).wires(places)
    return found, sizes


def test_over_nccl_stages_in_a_row_connect_in_two_rounds_whatever_their_number(pool: WorkerPool) -> None:
    """Two for activations, and two for gradients: each pair waits until both have met those before it. The groups of
    the data axis and of the tensor axis have one member each, which connects to nobody."""
    ends_of, sizes = zip(*pool.run(met, 4, placement(SCHEDULES["1f1b"](4, 4))), strict=True)
    assert sizes == ([4, 4],) * 4
    waiting, rounds = [*ends_of], 0
    while any(waiting):
        heads = [ends[0] if ends else None for ends in waiting]
        ready = {ends for ends in heads if ends is not None and heads.count(ends) == 2}
        assert ready, "they wait for each other"
        waiting = [ends[1:] if ends and ends[0] in ready else ends for ends in waiting]
        rounds += 1
    assert rounds == 4
