"""The process groups of a layout: one for each axis, one for each copy of the model, and the pipeline's links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_parallel.layout import Layout


@dataclass
class Links:
    """The groups over which a stage exchanges messages with its neighbours; None where there is no neighbour.

    Attributes:
        forward_in: activations from the previous stage.
        forward_out: activations to the next stage.
        backward_in: gradients from the next stage.
        backward_out: gradients to the previous stage.
    """

    forward_in: dist.ProcessGroup | None = None
    forward_out: dist.ProcessGroup | None = None
    backward_in: dist.ProcessGroup | None = None
    backward_out: dist.ProcessGroup | None = None


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
        links: the groups of messages between neighbouring stages.
    """

    def __init__(self, layout: Layout, timeout: timedelta | None = None, device: torch.device | None = None) -> None:
        self._layout = layout
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        everyone = layout.everyone()
        self._along = {axis.name: self._own([place.peers(axis.name) for place in everyone]) for axis in layout.axes}
        self.model = self._own([place.model_peers() for place in everyone])
        self.links = self._make_links(device)

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

    def _make_links(self, device: torch.device | None) -> Links:
        """Over gloo the links are the pipeline's own group: between any two ranks, activations and gradients run in
        opposite directions, so they never meet.

        Over NCCL each pair and direction has a group of its own, because NCCL runs what is posted on one group in the
        order of posting.
        """
        layout, pipeline = self._layout, self.along("pipeline")
        if dist.get_backend(pipeline) != "nccl":
            before = None if layout.is_first_stage else pipeline
            after = None if layout.is_last_stage else pipeline
            return Links(forward_in=before, forward_out=after, backward_in=after, backward_out=before)
        links = Links()
        for place in layout.everyone():
            if place.is_last_stage:
                continue
            earlier, later = place.rank, place.rank_at(pipeline=place.stage + 1)
            forward, backward = self._connected(earlier, later, device), self._connected(later, earlier, device)
            if layout.rank == earlier:
                links.forward_out, links.backward_in = forward, backward
            elif layout.rank == later:
                links.forward_in, links.backward_out = forward, backward
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
