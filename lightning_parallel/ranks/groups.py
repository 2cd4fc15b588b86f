"""The process groups of a layout: one for each axis, one for each copy of the model, and the wires between chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_parallel.private.torch.groups import group_of_members
from lightning_parallel.ranks.collectives import reduce_tensor
from lightning_parallel.ranks.layout import AXES, Layout, Placement


@dataclass(frozen=True)
class Wire:
    """A way for messages between two ranks: a process group, and a tag that nothing else uses in it. In ``host_group``
    each message is announced from host to host, under the same tag; it is None if the message itself tells the
    receiving host all it has to know."""

    group: dist.ProcessGroup
    tag: int
    host_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Wires:
    """The wires over the cuts between chunks on different stages, by cut, as far as this rank has an end of them. Cut c
    lies between the chunks c and c + 1. Activations go to the later chunk, gradients back from it."""

    activations: dict[int, Wire] = field(default_factory=dict)
    gradients: dict[int, Wire] = field(default_factory=dict)


class Groups:
    """The process groups that this rank is a member of.

    A group is made by its members alone, so that what a rank does doesn't grow with the number of ranks. All ranks make
    theirs in one order: the axes, the model, the pipeline's hosts, those that the set-up asks for, then cut after
    cut. So no two ranks wait for each other in different groups. Two axes that join the same ranks share one group,
    since every gloo group costs three threads, of which one wakes up a hundred times a second. For the same reason the
    groups live as long as the process group, and the next Trainer finds those that it shares with this one.

    Args:
        timeout: of every group; None for torch's default.
        device: this rank's device. Only NCCL needs it.

    Attributes:
        model: the group of the ranks that hold one copy of the model together: all stages and all tensor shards.
        host_group: the ranks of the pipeline axis, for tensors in host memory (:meth:`on_host`).
    """

    def __init__(self, layout: Layout, timeout: timedelta | None = None, device: torch.device | None = None) -> None:
        self._layout = layout
        self._timeout, self._device = timeout, device
        self._over_nccl = dist.get_backend() == "nccl"
        self._along = {axis.name: self.joining(layout.peers(axis.name)) for axis in AXES}
        self.model = self.joining(layout.model_peers())
        self.host_group = self.on_host(layout.peers("pipeline"))

    def along(self, axis: str) -> dist.ProcessGroup:
        """The group of this rank along an axis."""
        return self._along[axis]

    def joining(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The group of some global ranks, this one among them. It is made once. All its ranks call this, in one order
        for all groups that they share."""
        group = self._group(ranks)
        if self._over_nccl:  # which connects at the first message; in the first step others may be under way
            reduce_tensor(torch.zeros(1, device=self._device), group, dist.ReduceOp.SUM)
        return group

    def on_host(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The group of some ranks for tensors in host memory, so that no host waits for a GPU. Over gloo it is that of
        :meth:`joining`; over NCCL it is a gloo group of its own, made once. It is called as :meth:`joining` is."""
        return self._group(ranks, "gloo", "on the host") if self._over_nccl else self.joining(ranks)

    def _group(self, ranks: Iterable[int], backend: str | None = None, purpose: str = "") -> dist.ProcessGroup:
        members = sorted(ranks)
        assert self._layout.rank in members, f"rank {self._layout.rank} is not in {members}"
        return group_of_members(members, self._timeout, backend, purpose)

    def wires(self, placement: Placement | None = None) -> Wires:
        """The wires between chunks at a placement (the stage of each chunk; by default each stage has one). All ranks
        of a pipeline call it.

        Messages over one cut and of one kind are used in the order in which they are sent. Others needn't follow that
        order, so each cut and kind has a wire of its own. Over gloo that is a tag of the pipeline axis's group. Over
        NCCL tags count for nothing: a group has one queue for each pair of ranks. There, cuts that join the same pair
        take *lanes* 0, 1, ..., and each kind has a group for each lane::

            interleaved over 4 stages    cut      0    1    2    3    4    5    6
                                         pair     01   12   23   03   01   12   23
                                         lane     0    0    0    0    1    1    1
        """
        placement = tuple(range(self._layout.stages)) if placement is None else placement
        made = Wires()
        greetings: list[tuple[int, dist.ProcessGroup, tuple[int, int]]] = []  # a cut, and who sends to whom over it
        lanes: Counter[frozenset[int]] = Counter()
        for cut, (earlier, later) in enumerate(pairwise(placement)):
            if earlier == later:
                continue
            lane = lanes[frozenset((earlier, later))]
            lanes[frozenset((earlier, later))] += 1
            for kind, wires, ends in ((0, made.activations, (earlier, later)), (1, made.gradients, (later, earlier))):
                wire = self._wire(cut, kind, lane)
                if self._layout.stage in ends:
                    wires[cut] = wire
                    greetings.append((cut, wire.group, ends))
        if self._over_nccl:
            for _, group, (sender, receiver) in sorted(greetings, key=lambda greeting: greeting[0] % 2):
                self._greet(group, sender, receiver)
        return made

    def _wire(self, cut: int, kind: int, lane: int) -> Wire:
        """The wire of a kind over a cut. All ranks of a pipeline call it, in the order of cuts: it may make a group."""
        pipeline, tag = self.along("pipeline"), 2 * cut + kind
        if not self._over_nccl:
            return Wire(pipeline, tag)
        group = self._group(self._layout.peers("pipeline"), purpose=f"kind {kind}, lane {lane}")
        return Wire(group, tag, self.host_group)

    def _greet(self, group: dist.ProcessGroup, sender: int, receiver: int) -> None:
        """Send a first message from stage ``sender`` to stage ``receiver``. This rank is on one of them.

        NCCL connects two ranks at their first message, and both wait for it. If this happened in the first step,
        stages could deadlock. Here they connect in one order: first over all even cuts, then over all odd ones. So
        stages in a row need two rounds for activations and two for gradients, and not one for each cut.
        """
        greeting = torch.zeros(1, device=self._device)
        source, destination = (self._layout.rank_at(pipeline=stage) for stage in (sender, receiver))
        if self._layout.rank == source:
            dist.send(greeting, destination, group=group)
        else:
            dist.recv(greeting, source, group=group)
