"""Small messages between any two stages of a pipeline, beside those of its schedule, from host to host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.posting import posts_directly
from lightning_parallel.ranks.groups import Wire
from lightning_parallel.ranks.run import Run

_TAG = 1 << 20  # a schedule's links count theirs from 0
_HOST = torch.device("cpu")


def side_links(run: Run, to: Iterable[int], of: Iterable[int]) -> tuple[list[Sender], list[Receiver]]:
    """Senders ``to`` stages, of tensors on the run's device, and receivers into host memory ``of`` stages. This rank's
    own stage is left out. A send waits for no GPU."""
    layout, wire = run.layout, Wire(run.groups.host_group, _TAG)

    def links(stages: Iterable[int], device: torch.device) -> list[Link]:
        peers = [layout.rank_at(pipeline=stage) for stage in stages if stage != layout.stage]
        return [Link(wire, peer, layout.describe(peer), device) for peer in peers]

    senders = [
        Sender(link, None if link.through_host else posts_directly(link.isend)) for link in links(to, run.device)
    ]
    return senders, [Receiver(link) for link in links(of, _HOST)]
