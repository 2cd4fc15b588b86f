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


def links_over_gloo() -> tuple[int, bool]:
    """The number of groups that this rank's links take, and whether each has a tag of its own."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    links = Groups(layout, timedelta(seconds=30)).wires()
    wires = [*links.activations.values(), *links.gradients.values()]
    return len({id(wire.group) for wire in wires}), len({wire.tag for wire in wires}) == len(wires)


def test_over_gloo_all_links_share_one_group(pool: WorkerPool) -> None:
    """And one thread that polls."""
    assert pool.run(links_over_gloo, 3) == [(1, True)] * 3


def over_lanes(placements: list[Placement]) -> list[list[tuple[int, ...]]]:
    """As over NCCL, but on CPUs: for each wire of this rank its group's number and the two stages; what came over them,
    all at once, is checked."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    found = []
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


def test_over_nccl_each_cut_and_kind_has_a_queue_of_its_own(pool: WorkerPool) -> None:
    """A group has one for each pair of ranks."""
    placements = [placement(SCHEDULES[name](4, 4)) for name in ("1f1b", "interleaved", "zbv")]
    for found in pool.run(over_lanes, 4, placements):
        assert all(len(set(wires)) == len(wires) for wires in found)
        assert [len({group for group, *_ in wires}) for wires in found] == [2, 4, 4]


def met(places: Placement) -> list[tuple[int, int]]:
    """Who sends whom a first message, in this rank's order."""
    layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
    found: list[tuple[int, int]] = []
    with (
        patch("lightning_parallel.ranks.groups.dist.get_backend", return_value="nccl"),
        patch.object(Groups, "_greet", lambda self, group, *ends: found.append(ends)),
    ):
        Groups(layout, timedelta(seconds=30), torch.device("cpu")).wires(places)
    return found


def test_over_nccl_stages_in_a_row_connect_in_two_rounds_whatever_their_number(pool: WorkerPool) -> None:
    """Two for activations, and two for gradients: each pair waits until both have met those before it."""
    waiting, rounds = pool.run(met, 4, placement(SCHEDULES["1f1b"](4, 4))), 0
    while any(waiting):
        heads = [ends[0] if ends else None for ends in waiting]
        ready = {ends for ends in heads if ends is not None and heads.count(ends) == 2}
        assert ready, "they wait for each other"
        waiting = [ends[1:] if ends and ends[0] in ready else ends for ends in waiting]
        rounds += 1
    assert rounds == 4


def greeted() -> list[int]:
    """The sizes of the groups that NCCL would connect on this rank."""
    sizes: list[int] = []
    with (
        patch("lightning_parallel.ranks.groups.dist.get_backend", return_value="nccl"),
        patch.object(dist, "all_reduce", lambda tensor, *op, group: sizes.append(dist.get_world_size(group))),
    ):
        Groups(Layout.resolve(2, dist.get_rank(), pipeline=2), timedelta(seconds=30), torch.device("cpu"))
    return sizes


def test_over_nccl_a_rank_alone_connects_to_nobody(pool: WorkerPool) -> None:
    """That of the data axis and of the tensor axis has one member each."""
    assert pool.run(greeted, 2) == [[2, 2]] * 2
