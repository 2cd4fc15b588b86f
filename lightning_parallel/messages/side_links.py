"""Small messages between any two stages of a pipeline, beside those of its schedule, from host to host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.posting import PostsDirectly
from lightning_parallel.ranks.groups import Wire
from lightning_parallel.ranks.run import Run

_FIRST_TAG = 1 << 20  # a schedule's links count their tags from 0


class SideLinks:
    """Links from and to this rank's stage for one kind of message, of number ``kind``. This rank may send tensors on
    its device; a send waits for no GPU."""

    def __init__(self, run: Run, kind: int) -> None:
        self._layout, self._device = run.layout, run.device
        self._wire = Wire(run.groups.host_group, _FIRST_TAG + kind)

    def senders(self, stages: Iterable[int]) -> list[Sender]:
        """Senders to each of these stages but this one."""
        links = [self._link(stage, self._device) for stage in stages if stage != self._layout.stage]
        return [Sender(link, None if link.through_host else PostsDirectly(link.isend)) for link in links]

    def receivers(self, stages: Iterable[int]) -> list[Receiver]:
        """Receivers from each of these stages but this one, into host memory."""
        cpu = torch.device("cpu")
        return [Receiver(self._link(stage, cpu)) for stage in stages if stage != self._layout.stage]

    def flags(self, stages: Iterable[int]) -> list[FlagLink]:
        """Links for flags to and from each of these stages but this one."""
        cpu = torch.device("cpu")
        return [FlagLink(self._link(stage, cpu)) for stage in stages if stage != self._layout.stage]

    def _link(self, stage: int, device: torch.device) -> Link:
        peer = self._layout.rank_at(pipeline=stage)
        return Link(self._wire, peer, self._layout.describe(peer), device)


class FlagLink:
    """Sends and receives flags over a link, one byte each."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, flag: bool) -> None:
        """Send a flag."""
        buffer = torch.tensor([flag], dtype=torch.uint8)
        self._sent.append((self._link.isend(buffer), buffer))

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` flags have arrived."""
        while len(self._sent) > keep:
            self._link.wait(self._sent.popleft()[0])

    def take(self) -> bool:
        """Wait for the next flag."""
        buffer = torch.empty(1, dtype=torch.uint8)
        self._link.wait(self._link.irecv(buffer))
        return bool(buffer)
