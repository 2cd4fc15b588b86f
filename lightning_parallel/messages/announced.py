"""Messages in the memory of GPUs, announced from host to host.

Over NCCL, the description of a message (``channel.py``) can't lie in the message: to read it there, the host would have
to wait until the device has run all that was launched before. So it goes over gloo, from host to host, as soon as the
message is launched. The receiver's host reads it, and launches a receive of exactly this format. It waits for a host
that is ahead of its device, and never for a device::

    sender's host        launch layer, announce, launch send     launch the next layer ...
    receiver's host                        \\---> launch receive, launch layer ...
    sender's device         layer ........... send
    receiver's device                         receive, layer ...........

    announcement    [ 0, a ]     a message in the format that is expected
                    [ n, a ]     in another one: its description follows, n bytes, on the host too
                    [ -1, a ]    end of stream

Gradients are announced too, though their format is known. NCCL's receive is a kernel that spins until the message
comes. Were it launched before its send is, whatever waits for the whole device meanwhile would wait for ever: the
allocator when memory is short, a kernel that is loaded at its first launch, a profiler. In GPipe the first gradient's
receive would be posted ahead before forwards that this gradient depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.channel import END, Link, Receiver, Sender
from lightning_parallel.messages.message import Format, Packet, encode, format_of
from lightning_parallel.messages.posting import posts_directly


class AnnouncingSender(Sender):
    """Sends messages over a link between devices, in order. Their announcements go over a link between hosts."""

    def __init__(self, link: Link, announcements: Link) -> None:
        # What waits for a proof of arrival are announcements: a message may have left, into the peer's memory, and its
        # announcement not. Hosts that waited for that could wait for each other.
        super().__init__(announcements, posts_directly(announcements.isend))
        self._direct, self._launch = link, posts_directly(link.isend)
        self._leaving: deque[tuple[Packet, Future[dist.Work]]] = deque()

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        self._release()
        format = format_of(tensors)
        if any(tensor.numel() for tensor in tensors):
            # A copy: before it has been sent, a layer may write its next output where the tensor lies.
            packet = Packet(format, False, self._direct.device).fill(tensors)
            self._leaving.append((packet, self._launch(packet.buffer, None)))
        description = [] if format == self._expected(place) else [encode(format)]
        self._formats[place] = format
        words = sum(part.numel() for part in description), acknowledged
        self._post(self._packet(()).fill((), words), *description)
        return format

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        self._post(self._packet(()).fill((), (END, acknowledged)))

    def confirm(self, messages: int) -> None:
        super().confirm(messages)
        self._release()

    def _release(self) -> None:
        """Release the copies of messages that are known to have left."""
        while self._leaving and self._leaving[0][1].result().is_completed():
            self._leaving.popleft()

    def flush(self, keep: int = 0) -> None:
        super().flush(keep)
        if not keep:
            while self._leaving:
                self._direct.wait(self._leaving.popleft()[1].result())


class AnnouncedReceiver(Receiver):
    """Receives such messages, in order."""

    def __init__(self, link: Link, announcements: Link) -> None:
        super().__init__(announcements)
        self._direct = link

    def _first_packet(self, place: Hashable) -> Packet:
        return Packet((), True, self._link.device)

    def _tensors(self, first: Packet, status: int, format: Format) -> list[Tensor]:
        link = self._direct
        with link.streams.incoming():
            packet = Packet(format, False, link.device)
            if packet.buffer.numel():
                link.wait(link.irecv(packet.buffer))
        link.streams.arrived(packet.buffer)
        return packet.tensors
