"""Small messages between any two stages of a pipeline, beside those of its schedule, from host to host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.posting import PostsDirectly
from lightning_parallel.ranks.groups import Wire
from lightning_parallel.ranks.run import Run

_FIRST_TAG = 1 << 20  # a schedule's links count their tags from 0
_HOST = torch.device("cpu")


class SideLinks:
    """Links from and to this rank's stage for one kind of message, of number ``kind``. This rank sends tensors on
    ``device``; a send waits for no GPU."""

    def __init__(self, run: Run, kind: int, device: torch.device = _HOST) -> None:
        self._layout, self._device = run.layout, device
        self._wire = Wire(run.groups.host_group, _FIRST_TAG + kind)

    def senders(self, stages: Iterable[int]) -> list[Sender]:
        """Senders to each of these stages but this one."""
        links = [self._link(stage, self._device) for stage in stages if stage != self._layout.stage]
        return [Sender(link, None if link.through_host else PostsDirectly(link.isend)) for link in links]

    def receivers(self, stages: Iterable[int]) -> list[Receiver]:
        """Receivers from each of these stages but this one, into host memory."""
        return [Receiver(self._link(stage, _HOST)) for stage in stages if stage != self._layout.stage]

    def _link(self, stage: int, device: torch.device) -> Link:
        peer = self._layout.rank_at(pipeline=stage)
        return Link(self._wire, peer, self._layout.describe(peer), device)


def next_message(receiver: Receiver) -> list[Tensor]:
    """Wait for the next message over a side link, which was sent with ``place=0``."""
    receiver.post(0)
    arrival = receiver.take()
    assert arrival is not None, "side links have no end of stream"
    return arrival.receive()
