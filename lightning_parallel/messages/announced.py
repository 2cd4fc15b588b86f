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

Gradients are announced too, though their format is known. NCCL's send and receive are kernels that spin until the other
one runs. Were a receive launched before its send is, whatever waits for the whole device meanwhile would wait for ever:
the allocator when memory is short, a kernel that is loaded at its first launch, a profiler. In GPipe the first
gradient's receive would be posted ahead before forwards that this gradient depends on.

For the same reason no send may wait for long for its receive. A host that waits for a message launches the receives of
all messages that are announced meanwhile, whichever neighbour they come from. gloo can't wait for one of several. So a
thread of each receiver waits for its announcements, and puts them into one queue, from which the stage's thread reads::

    thread of activations in    [ 0, a ] --.
                                            >-- Announcements --> launch receive, until the message in question is there
    thread of gradients in      [ 0, a ] --'
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.channel import END_OF_STREAM, Link, Receiver, Sender, received_format
from lightning_parallel.messages.message import Format, Packet, encode, format_of
from lightning_parallel.messages.posting import Posted, posts_directly
from lightning_parallel.private.torch.groups import abort_groups


class AnnouncingSender(Sender):
    """Sends messages over a link between devices, in order. Their announcements go over a link between hosts."""

    def __init__(self, link: Link, announcements: Link) -> None:
        # What waits for a proof of arrival are announcements: a message may have left, into the peer's memory, and its
        # announcement not. Hosts that waited for that could wait for each other.
        super().__init__(announcements, posts_directly(announcements.isend))
        self._direct, self._launch = link, posts_directly(link.isend)
        self._leaving: deque[tuple[Packet, Posted]] = deque()

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
        self._post(self._packet(()).fill((), (END_OF_STREAM, acknowledged)))

    def confirm(self, messages: int) -> None:
        super().confirm(messages)
        self._release()

    def _release(self) -> None:
        """Release the copies of messages that are known to have left."""
        while self._leaving and self._leaving[0][1]().is_completed():
            self._leaving.popleft()

    def flush(self, keep: int = 0) -> None:
        super().flush(keep)
        if not keep:
            while self._leaving:
                self._direct.wait(self._leaving.popleft()[1]())


_Announced: TypeAlias = tuple[int, int, Format | None]  # status, acknowledged, and a format if it is described
_Come: TypeAlias = "SimpleQueue[tuple[weakref.ref[AnnouncedReceiver], _Announced | Exception]]"


class Announcements:
    """What is announced to this rank, in the order in which it comes, from all neighbours."""

    def __init__(self) -> None:
        self._come: _Come = SimpleQueue()

    def listen(self, link: Link, receiver: AnnouncedReceiver) -> Callable[[], None]:
        """Listen for what a link announces to a receiver. Each call of the function that is returned has one more
        announcement come."""
        wanted: SimpleQueue[bool] = SimpleQueue()
        arguments = link, wanted, weakref.ref(receiver), self._come
        Thread(target=_listen, args=arguments, name="announcements", daemon=True).start()
        weakref.finalize(receiver, wanted.put, False)
        return lambda: wanted.put(True)

    def wait(self) -> None:
        """Wait for the next announcement, and launch the receive of its message.

        Raises:
            PeerLostError: a neighbour is gone.
        """
        reference, announced = self._come.get()
        if isinstance(announced, Exception):
            self._come.put((reference, announced))  # for whoever waits next
            raise announced
        receiver = reference()
        assert receiver is not None, "a receiver lives as long as it expects messages"
        receiver.launch(*announced)


def _listen(
    link: Link,
    wanted: SimpleQueue[bool],
    receiver: weakref.ref[AnnouncedReceiver],
    come: _Come,
) -> None:
    packet = Packet((), True, link.device)
    try:
        while wanted.get():
            link.wait(link.irecv(packet.buffer))
            status, acknowledged = packet.words()
            come.put((receiver, (status, acknowledged, received_format(link, status) if status > 0 else None)))
    except Exception as error:  # raised again on the stage's thread
        come.put((receiver, error))
        if dist.is_initialized() and dist.get_backend() == "nccl":
            abort_groups()  # the stage's thread may wait for its GPU, which waits for the peer's


class AnnouncedReceiver(Receiver):
    """Receives such messages, in order. ``announcements`` are this rank's, those of all its receivers."""

    def __init__(self, link: Link, hosts: Link, announcements: Announcements) -> None:
        super().__init__(link)
        self._announcements = announcements
        self._one_more = announcements.listen(hosts, self)
        self._launched: deque[tuple[int, Packet | None]] = deque()  # acknowledged, and the message or an end of stream
        self._spare = 0  # announcements that are listened for, of messages that an end of stream has called off

    def expect(self, place: Hashable) -> None:
        self._coming.append(place)
        if self._spare:
            self._spare -= 1
        else:
            self._one_more()

    def launch(self, status: int, acknowledged: int, format: Format | None) -> None:
        """Launch the receive of the next message, which has been announced so."""
        place, link = self._coming.popleft(), self._link
        if format is not None:
            self._formats[place] = format
        packet: Packet | None = None
        if status != END_OF_STREAM:
            with link.streams.incoming:
                packet = Packet(self._expected(place), False, link.device)
                if packet.buffer.numel():
                    link.wait(link.irecv(packet.buffer))
        else:
            self._spare += len(self._coming)
            self._coming.clear()
        self._launched.append((acknowledged, packet))

    def drop(self) -> None:
        while self._coming or self._launched:
            self.take()

    def take(self) -> tuple[list[Tensor], Format] | None:
        while not self._launched:
            self._announcements.wait()
        self.taken += 1
        self.acknowledged, packet = self._launched.popleft()
        if packet is None:
            return None
        self._link.streams.arrived(packet.buffer)
        return packet.tensors, packet.format
