"""Messages in the memory of GPUs, announced from host to host.

Over NCCL, the description of a message (``channel.py``) can't lie in the message: to read it there, the host would have
to wait until the device has run all that was launched before. So it goes over gloo, from host to host, as soon as the
message is launched. The receiver's host reads it, and launches a receive of exactly this format. It waits for a host
that is ahead of its device, and never for a device::

    sender's host        launch layer, announce, launch send     launch the next layer ...
    receiver's host                        \\---> launch receive, launch layer ...
    sender's device         layer ........... send
    receiver's device                         receive, layer ...........

    announcement    [ 0, a ]     a message in the format of the last one of this place, or gradients
                    [ n, a ]     in another one: its description follows, n bytes, on the host too
                    [ n, 0 ]     gradients, of which n are missing: their indices follow, on the host too
                    [ -1, a ]    end of stream

Gradients are announced too, though their format is known. NCCL's receive is a kernel that spins until the message
comes. Were it launched before its send is, whatever waits for the whole device meanwhile would wait for ever: the
allocator when memory is short, a kernel that is loaded at its first launch, a profiler. In GPipe the first gradient's
receive would be posted ahead before forwards that this gradient depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.messages.channel import END, Link, Receiver, Sender, indices_from, indices_of
from lightning_parallel.messages.message import Format, decode, encode, format_of
from lightning_parallel.messages.posting import PostsDirectly


class AnnouncingSender(Sender):
    """Sends messages over a link between devices, in order. Their announcements go over a link between hosts."""

    def __init__(self, link: Link, announcements: Link) -> None:
        self._direct = PostsDirectly(link.isend)
        super().__init__(link, self._direct)
        self._by_host = announcements
        self._announced: deque[list[tuple[dist.Work, Tensor]]] = deque()  # of messages that may not have arrived

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        self._launch(tensors)
        format = format_of(tensors)
        if format == self._formats.get(place):
            self._announce(0, acknowledged)
        else:
            description = encode(format)
            self._announce(description.numel(), acknowledged, description)
            self._formats[place] = format
        return format

    def send_gradients(self, gradients: Sequence[Tensor], missing: Sequence[int] = ()) -> None:
        self._launch(gradients)
        if gradients:
            self._announce(len(missing), 0, *indices_of(missing))
        else:
            self._announced.append([])

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        self._post()
        self._announce(END, acknowledged)

    def confirm(self, messages: int) -> None:
        super().confirm(messages)
        # Only where the peer is known to have read them: a message may have left, into the peer's memory, and its
        # announcement not. Hosts that waited for that could wait for each other.
        while self._announced and self.sent - len(self._announced) < messages:
            for work, _ in self._announced.popleft():
                self._by_host.wait(work)

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        """Launch a send of a copy: before it has been sent, a layer may write its next output where the tensor lies."""
        self._release()
        if any(tensor.numel() for tensor in tensors):
            self._post(self._packet(format_of(tensors), trailer=False).fill(tensors))
        else:
            self._post()

    def _release(self) -> None:
        """Release the buffers of messages that are known to have left. gloo doesn't show that."""
        while self._unconfirmed and self._unconfirmed[0] and self._direct.next_is_done():
            super().confirm(self.sent - len(self._unconfirmed) + 1)  # of the buffers only

    def _announce(self, status: int, acknowledged: int, *more: Tensor) -> None:
        parts = [torch.tensor([status, acknowledged]), *more]
        self._announced.append([(self._by_host.isend(part), part) for part in parts])


class AnnouncedReceiver(Receiver):
    """Receives such messages, in order."""

    def __init__(self, link: Link, announcements: Link) -> None:
        super().__init__(link)
        self._by_host = announcements
        # An announcement, and what it is for: a place, or the format of gradients.
        self._coming: tuple[dist.Work, Tensor, Any] | None = None

    # -- activations ---------------------------------------------------------------------------------------------

    def post(self, place: Hashable) -> None:
        if self._coming is None:
            announcement = torch.empty(2, dtype=torch.int64)
            self._coming = self._by_host.irecv(announcement), announcement, place

    def take(self, then: Hashable = None) -> Arrival | None:
        status, place = self._announced()
        if status > 0:
            description = torch.empty(status, dtype=torch.uint8)
            self._by_host.wait(self._by_host.irecv(description))
            self._formats[place] = decode(description)
        if then is not None:
            self.post(then)
        format = self._formats.get(place, ())
        return None if status == END else Arrival(self._launched(format), format)

    # -- gradients -----------------------------------------------------------------------------------------------

    def post_gradients(self, format: Format) -> None:
        self.post(format)

    def take_gradients(self, then: Format = ()) -> tuple[list[Tensor], list[int]]:
        count, format = self._announced()
        missing = indices_from(self._by_host, count)
        if then:
            self.post_gradients(then)
        return self._launched(format), missing

    # -- both ----------------------------------------------------------------------------------------------------

    def _announced(self) -> tuple[int, Any]:
        """Wait for the announcement whose receive is posted. Returns its first word, and what the receive was posted
        for."""
        assert self._coming is not None, "post before you take"
        (work, announcement, wanted), self._coming = self._coming, None
        self._by_host.wait(work)
        status, self.acknowledged = announcement.tolist()
        return status, wanted

    def _launched(self, format: Format) -> list[Tensor]:
        """The tensors of an announced message, returned as soon as its receive is launched."""
        packet = self._packet(format, trailer=False)
        if packet.buffer.numel():
            self._begin(packet, None)
            self._wait()
        return self._on_device(packet)
