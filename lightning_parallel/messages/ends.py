"""The ends of a chunk's ways of messages: over links to other stages, or directly to another chunk of this stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch

from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements, AnnouncingSender
from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.handover import Handover
from lightning_parallel.messages.streams import Streams
from lightning_parallel.ranks.groups import Links, Wire
from lightning_parallel.ranks.layout import Layout, Placement


@dataclass(frozen=True)
class Kept:
    """What a chunk keeps for a later one of its stage, and the gradients that come back."""

    activations: Handover = field(default_factory=Handover)
    gradients: Handover = field(default_factory=Handover)


@dataclass(frozen=True)
class Ends:
    """The ends of a chunk's four ways of messages; None where there is no neighbour.

    Attributes:
        earlier: what earlier chunks of this stage keep for this one, by chunk.
        later: what it keeps for later ones.
    """

    activations_in: Receiver | Handover | None
    activations_out: Sender | Handover | None
    gradients_in: Receiver | Handover | None
    gradients_out: Sender | Handover | None
    earlier: Mapping[int, Kept]
    later: Mapping[int, Kept]


def ends_of(placement: Placement, layout: Layout, links: Links, device: torch.device) -> dict[int, Ends]:
    """The ends of this rank's chunks, by chunk. ``placement`` is the stage of each chunk."""
    streams, announcements = Streams(device), Announcements()
    activations: dict[int, Handover] = {}
    gradients: dict[int, Handover] = {}

    def over(cut: int, neighbour: int, wires: dict[int, Wire], inside: dict[int, Handover], end: type[Any]) -> Any:
        if not 0 <= neighbour < len(placement):
            return None
        if placement[neighbour] == layout.stage:
            return inside.setdefault(cut, Handover())
        peer = layout.rank_at(pipeline=placement[neighbour])
        link = partial(Link, peer=peer, peer_name=layout.describe(peer))
        wire = wires[cut]
        for_messages = link(wire, device=device, streams=streams)
        if wire.host_group is None:
            return end(for_messages)
        hosts = link(Wire(wire.host_group, wire.tag), device=torch.device("cpu"))
        if end is Sender:
            return AnnouncingSender(for_messages, hosts)
        return AnnouncedReceiver(for_messages, hosts, announcements)

    own = [chunk for chunk, stage in enumerate(placement) if stage == layout.stage]
    kept = {pair: Kept() for pair in combinations(own, 2)}
    return {
        chunk: Ends(
            activations_in=over(chunk - 1, chunk - 1, links.activations, activations, Receiver),
            activations_out=over(chunk, chunk + 1, links.activations, activations, Sender),
            gradients_in=over(chunk, chunk + 1, links.gradients, gradients, Receiver),
            gradients_out=over(chunk - 1, chunk - 1, links.gradients, gradients, Sender),
            earlier={one: each for (one, other), each in kept.items() if other == chunk},
            later={other: each for (one, other), each in kept.items() if one == chunk},
        )
        for chunk in own
    }
