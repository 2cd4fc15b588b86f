"""The process groups of a layout: one for each axis, one for each copy of the model, and the links between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_parallel.layout import Layout, Placement


@dataclass(frozen=True)
class Wire:
    """A way for messages between two ranks: a process group and a tag that nothing else uses there."""

    group: dist.ProcessGroup
    tag: int


@dataclass(frozen=True)
class Links:
    """The wires over the cuts between chunks on different stages, as far as this rank has an end of them. Cut c is that
    between the chunks c and c + 1.

    Attributes:
        activations: by cut, towards the later chunk.
        gradients: by cut, back from it.
    """

    activations: dict[int, Wire] = field(default_factory=dict)
    gradients: dict[int, Wire] = field(default_factory=dict)


class Groups:
    """The process groups that this rank is a member of.

    Making them is collective: every rank creates every group, in the same order, because
    ``torch.distributed.new_group`` requires it. Two axes that join the same ranks share one group, since every gloo
    group costs a thread that wakes up a hundred times a second.

    Args:
        layout: the axes, as this rank sees them.
        timeout: of every group; None for torch's default.
        device: this rank's device, needed where the backend is NCCL.

    Attributes:
        model: the group of the ranks that hold one copy of the model together: all stages and all tensor shards.
    """

    def __init__(self, layout: Layout, timeout: timedelta | None = None, device: torch.device | None = None) -> None:
        self._layout = layout
        self._timeout, self._device = timeout, device
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        everyone = layout.everyone()
        self._along = {axis.name: self._own([place.peers(axis.name) for place in everyone]) for axis in layout.axes}
        self.model = self._own([place.model_peers() for place in everyone])
        self._links: dict[Placement, Links] = {}

    def along(self, axis: str) -> dist.ProcessGroup:
        """The group of this rank along an axis."""
        return self._along[axis]

    def joined(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make several groups, given by their global ranks. Returns the last one that this rank is in; None for none.

        Every rank calls it with the same groups. A group is made once, and found again by its ranks.
        """
        found: dist.ProcessGroup | None = None
        for ranks in groups:
            key = tuple(sorted(ranks))
            if key not in self._made:
                self._made[key] = dist.new_group(list(key), timeout=self._timeout)
            if self._layout.rank in key:
                found = self._made[key]
        return found

    def _own(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        found = self.joined(groups)
        assert found is not None, f"rank {self._layout.rank} is in none of the groups {groups}"
        return found

    def links(self, placement: Placement | None = None) -> Links:
        """The links between chunks, made once for a placement. All ranks call it.

        Messages over one cut and of one kind are used in the order in which they are sent, which others needn't follow.
        So each has a wire of its own. Over gloo that is a tag of the pipeline's own group. Over NCCL, which runs what
        is posted on a group in the order of posting, it is a group.

        Args:
            placement: the stage of each chunk; by default each stage has one.
        """
        placement = tuple(range(self._layout.stages)) if placement is None else placement
        if placement not in self._links:
            self._links[placement] = self._connect(placement)
        return self._links[placement]

    def _connect(self, placement: Placement) -> Links:
        layout, pipeline = self._layout, self.along("pipeline")
        links = Links()
        crossing = [(cut, ends) for cut, ends in enumerate(pairwise(placement)) if ends[0] != ends[1]]
        for cut, (earlier, later) in crossing:
            for kind, wires, ends in ((0, links.activations, (earlier, later)), (1, links.gradients, (later, earlier))):
                if dist.get_backend(pipeline) != "nccl":
                    if layout.stage in ends:
                        wires[cut] = Wire(pipeline, 2 * cut + kind)
                    continue
                for place in layout.everyone():
                    if place.stage == earlier:
                        ranks = [place.rank_at(pipeline=stage) for stage in ends]
                        group = self._connected(ranks[0], ranks[1], self._device)
                        if layout.rank in ranks:
                            wires[cut] = Wire(group, 0)
        return links

    def _connected(self, sender: int, receiver: int, device: torch.device | None) -> dist.ProcessGroup:
        """A new group for one direction of one pair, with a first message sent over it.

        NCCL connects two ranks at their first message, and both wait for it. If this happened in the first step,
        stages could deadlock. Here all ranks connect in the same order.
        """
        group = dist.new_group([sender, receiver], timeout=self._timeout)
        greeting = torch.zeros(1, device=device)
        if self._layout.rank == sender:
            dist.send(greeting, receiver, group=group)
        elif self._layout.rank == receiver:
            dist.recv(greeting, sender, group=group)
        return group
