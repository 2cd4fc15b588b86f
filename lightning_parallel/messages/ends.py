"""The ends of a chunk's ways of messages: over links to other stages, or directly to another chunk of this stage.

In a V the first chunk and the last one share a stage, so a skip connection from the first layers to the last ones is no
message (``cuts/flow.py``)::

    stage 1   chunk 0  ---- here ----> chunk 3        B of chunk 3  -- gradient --> B of chunk 0
    stage 0   chunk 1  -------------> chunk 2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements, AnnouncingSender
from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.message import Format, format_of
from lightning_parallel.messages.streams import Streams
from lightning_parallel.ranks.groups import Wire, Wires
from lightning_parallel.ranks.layout import Layout, Placement


class Handover:
    """A cut between two chunks of this stage: what one sends, the other takes in this process. It stands in the place
    of a sender and a receiver over a link, for one kind of message.

    Attributes:
        sent, taken, acknowledged: always 0, where a link's ends count messages: no buffers depend on them here.
    """

    sent = taken = acknowledged = 0

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Tensor], Format]] = deque()

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        """Hand over copies, as :meth:`.Sender.send` does: the next chunk may change its input in place. Returns their
        format."""
        format = format_of(tensors)
        self._messages.append(([tensor.detach().clone() for tensor in tensors], format))
        return format

    def take(self) -> tuple[list[Tensor], Format] | None:
        """The oldest message that hasn't been taken; None if there is none, as where a stream has ended."""
        return self._messages.popleft() if self._messages else None

    def drop(self) -> None:
        """Forget the messages that haven't been taken."""
        self._messages.clear()

    def expect(self, *_: object, **__: object) -> None:
        """Does nothing, as the other three: no receive is to be posted, no buffer to be given back, all messages have
        arrived, and no chunk waits for one that won't come."""

    confirm = flush = end = expect


@dataclass(frozen=True)
class WayIn:
    """A chunk's ends of a way from an earlier one: activations come, and their gradients go back."""

    activations: Receiver | Handover
    gradients: Sender | Handover


@dataclass(frozen=True)
class WayOut:
    """A chunk's ends of a way to a later one: activations go, and their gradients come back."""

    activations: Sender | Handover
    gradients: Receiver | Handover


@dataclass(frozen=True)
class Ends:
    """The ends of a chunk's ways, by the chunk at the other end: the one before or after it, or one of its stage."""

    into: Mapping[int, WayIn]
    out_of: Mapping[int, WayOut]


def ends_of(placement: Placement, layout: Layout, wires: Wires, device: torch.device) -> dict[int, Ends]:
    """The ends of this rank's chunks, by chunk. ``placement`` is the stage of each chunk."""
    streams, announcements = Streams(device), Announcements()

    def linked(wire: Wire, neighbour: int) -> tuple[Link, Link | None]:
        """For messages, and for announcements where there are any."""
        peer = layout.rank_at(pipeline=placement[neighbour])
        name = layout.describe(peer)
        announced = None if wire.host_group is None else Wire(wire.host_group, wire.tag)
        hosts = None if announced is None else Link(announced, peer, name, torch.device("cpu"))
        return Link(wire, peer, name, device, streams), hosts

    def sender(wire: Wire, neighbour: int) -> Sender:
        link, hosts = linked(wire, neighbour)
        return Sender(link) if hosts is None else AnnouncingSender(link, hosts)

    def receiver(wire: Wire, neighbour: int) -> Receiver:
        link, hosts = linked(wire, neighbour)
        return Receiver(link) if hosts is None else AnnouncedReceiver(link, hosts, announcements)

    own = [chunk for chunk, stage in enumerate(placement) if stage == layout.stage]
    here = {pair: (Handover(), Handover()) for pair in combinations(own, 2)}
    ends: dict[int, Ends] = {}
    for chunk in own:
        into = {one: WayIn(*ways) for (one, other), ways in here.items() if other == chunk}
        out_of = {other: WayOut(*ways) for (one, other), ways in here.items() if one == chunk}
        before, after = chunk - 1, chunk + 1
        if before >= 0 and before not in own:
            to_it = receiver(wires.activations[before], before)
            into[before] = WayIn(to_it, sender(wires.gradients[before], before))
        if after < len(placement) and after not in own:
            from_it = sender(wires.activations[chunk], after)
            out_of[after] = WayOut(from_it, receiver(wires.gradients[chunk], after))
        ends[chunk] = Ends(into, out_of)
    return ends
