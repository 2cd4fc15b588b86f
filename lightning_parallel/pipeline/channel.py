"""Messages between neighbouring stages: what a layer returned goes forward, its gradient comes back.

A message is one flat buffer: the tensors, each aligned, then a trailer of two words of 8 bytes. Its *format* (shapes,
dtypes, which tensors want a gradient) is not sent along: the sender and the receiver both remember, for each place in
the schedule, the format of the last message there, and expect the next to be the same. So a receive can be posted
before the message is made, at the cost of no extra message. Where a message is different (the last, smaller batch; a
longer sequence) its sender says so in the first word, and sends format and tensors after it:

    as expected     [ tensors ............ | 0, a ]
    otherwise       [ as long, contents void | n, a ]  [ format, n bytes ]  [ tensors | 0, a ]
    end of stream   [ as long, contents void | -1, a ]

A gradient needs no trailer: both sides know its format, that of the activation. Only one receive a direction is
posted ahead, since a format is known only once the message before it has been read; it is in flight while the stage
computes, which hides its latency. What can be done before a message has come is done before the wait for it: what
comes behind, the stage waits for, and those after it. So are the tensors in it handed out, their values yet to come
(:meth:`Receiver.expected`), and the memory of the next one is made.

gloo can't say whether a send is done without waiting for it, so a sender keeps its buffers until it *knows*
(:meth:`Sender.confirm`): the gradient of a microbatch proves that its activation arrived, and the second word, a,
counts the gradients that had arrived when the activation was sent. So buffers are bounded by what is in flight; they
are used again for messages of the same format, since the system takes longer to give fresh memory than to copy into it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread, current_thread

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.crossing import Arrival
from lightning_parallel.pipeline.message import (
    Format,
    Packet,
    decode,
    encode,
    format_of,
    unpack,
)

_END = -1


class PeerLostError(RuntimeError):
    """The stage at the other end of a link has stopped."""


class Link:
    """One direction between this rank and a neighbour: posts sends and receives of flat byte buffers.

    Tensors on a GPU travel through pinned host memory where the group's backend is gloo, so that several stages may
    share one GPU, and directly where it is NCCL.

    Args:
        group: one in which nothing else goes from the one rank to the other in this direction, by its default tag.
        peer: global rank of the neighbour.
        peer_name: how errors name it.
        device: where this stage computes.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, peer_name: str, device: torch.device) -> None:
        self._group = group
        self._peer = dist.get_group_rank(group, peer)  # isend and irecv would look it up for each message
        self._peer_name = peer_name
        self.device = device
        self.is_staged = device.type != "cpu" and dist.get_backend(group) == "gloo"

    def buffer(self, nbytes: int) -> Tensor:
        if self.is_staged:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def packet(self, format: Format, trailer: bool) -> Packet:
        return Packet(self.buffer(Packet.nbytes(format, trailer)), format, trailer)

    def arrived(self, packet: Packet) -> list[Tensor]:
        """The tensors in a packet that has come, where this stage computes."""
        return unpack(packet.buffer.to(self.device), packet.format) if self.is_staged else packet.tensors

    def isend(self, buffer: Tensor) -> dist.Work:
        try:
            return self._group.send([buffer], self._peer, 0)
        except RuntimeError as error:
            raise self._lost() from error

    def irecv(self, buffer: Tensor) -> dist.Work:
        try:
            return self._group.recv([buffer], self._peer, 0)
        except RuntimeError as error:
            raise self._lost() from error

    def wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> PeerLostError:
        return PeerLostError(
            f"The link to {self._peer_name} broke: that stage stopped, or did not answer within the timeout. "
            f"The cause is in its own output."
        )


class _Courier:
    """Posts sends from a thread of its own: gloo copies a message into a socket within the call that posts it, half a
    millisecond for a megabyte, which the stage need not wait for. The thread ends with this object."""

    def __init__(self, link: Link) -> None:
        self._handed: SimpleQueue[Tensor | None] = SimpleQueue()
        self._posted: SimpleQueue[dist.Work | BaseException] = SimpleQueue()
        thread = Thread(target=_post_all, args=(link, self._handed, self._posted), name="send", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._handed)

    def hand(self, buffer: Tensor) -> None:
        """Post ``buffer``, after all that were handed over before."""
        self._handed.put(buffer)

    def posted(self) -> dist.Work:
        """The next send, in the order of :meth:`hand`; waits until it has been posted."""
        work = self._posted.get()
        if isinstance(work, BaseException):
            raise work
        return work


def _post_all(link: Link, handed: SimpleQueue[Tensor | None], posted: SimpleQueue[dist.Work | BaseException]) -> None:
    while (buffer := handed.get()) is not None:
        try:
            posted.put(link.isend(buffer))
        except BaseException as error:  # raised again on the stage's thread
            posted.put(error)
        del buffer  # its memory is the sender's to release


def _end(thread: Thread, handed: SimpleQueue[Tensor | None]) -> None:
    """End a courier's thread, and with it its hold on the link: destroying a group joins gloo's threads only if nothing
    refers to it any more."""
    handed.put(None)
    if thread is not current_thread():  # where garbage is collected, which may be here
        thread.join(timeout=1.0)


class _Direct:
    """In the place of a :class:`_Courier` where a GPU is involved: posts from the stage's thread, whose stream orders
    it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._posted: deque[dist.Work] = deque()

    def hand(self, buffer: Tensor) -> None:
        self._posted.append(self._link.isend(buffer))

    def posted(self) -> dist.Work:
        return self._posted.popleft()


class Sender:
    """Sends messages over a link, in order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._formats: dict[Hashable, Format] = {}
        self._courier = _Courier(link) if link.device.type == "cpu" else _Direct(link)
        self._unconfirmed: deque[tuple[Packet | Tensor, ...]] = deque()
        self._confirmed = 0  # messages known to have arrived
        self._idle: deque[Packet] = deque()  # of messages that have arrived

    @property
    def sent(self) -> int:
        """Messages sent since the start."""
        return self._confirmed + len(self._unconfirmed)

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        """Send ``tensors`` as the message of a place in the schedule (any key that the receiver uses too), and the
        number of gradient messages that came back so far. Returns what kind of message it was."""
        actual = format_of(tensors)
        expected = self._formats.get(place, ())
        message = self._packed(tensors, actual, (0, acknowledged))
        if actual == expected:
            self._post(message)
        else:
            description = encode(actual)
            announcement = self._packed(None, expected, (description.numel(), acknowledged))
            details = self._link.buffer(description.numel()).copy_(description)
            self._post(announcement, details, message)
            self._formats[place] = actual
        return actual

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        """Answer the receive that the peer has posted for ``place``: there will be no such message."""
        self._post(self._packed(None, self._formats.get(place, ()), (_END, acknowledged)))

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Send gradients, whose format the receiver knows. None: no message."""
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.is_contiguous() and only.is_cpu and not only.is_complex():
            self._post(only.detach())  # as it lies in memory: a message needs no copy
        elif gradients:
            self._post(self._packed(gradients, format_of(gradients), None))
        else:
            self._post()

    def confirm(self, messages: int) -> None:
        """The peer is known to have received this many messages since the start: release their buffers."""
        while self._confirmed < messages and self._unconfirmed:
            for part in self._unconfirmed.popleft():
                self._link.wait(self._courier.posted())
                if isinstance(part, Packet):
                    self._idle.append(part)
            self._confirmed += 1

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived."""
        self.confirm(self._confirmed + len(self._unconfirmed) - keep)

    def _post(self, *parts: Packet | Tensor) -> None:
        """Send packets, and tensors that aren't the sender's, one after the other, as one message."""
        self._unconfirmed.append(parts)
        for part in parts:
            self._courier.hand(part.buffer if isinstance(part, Packet) else part)

    def _packed(self, tensors: Sequence[Tensor] | None, format: Format, trailer: tuple[int, int] | None) -> Packet:
        """A packet of ``format``, with ``tensors`` in their places; None: its contents are void."""
        packet = self._packet(format, trailer is not None)
        if tensors is not None:
            packet.fill(tensors)
        if trailer:
            packet.write(trailer)
        return packet

    def _packet(self, format: Format, trailer: bool) -> Packet:
        """One that is idle, or else a new one in the place of the longest idle: there are never more than have been in
        flight at a time."""
        for i, packet in enumerate(self._idle):
            if packet.fits(format, trailer):
                del self._idle[i]
                return packet
        if self._idle:
            self._idle.popleft()
        return self._link.packet(format, trailer)


class Receiver:
    """Receives messages over a link, in order, one posted ahead."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._formats: dict[Hashable, Format] = {}
        self._prepared: Packet | None = None
        self._posted: _Posted | None = None
        self.acknowledged = 0  # gradient messages that the peer had received when it sent the last message taken

    @property
    def is_posted(self) -> bool:
        return self._posted is not None

    def prepare(self, place: Hashable) -> None:
        """Make what :meth:`post` will need."""
        self._prepared = self._packet(self._formats.get(place, ()), trailer=True)

    def post(self, place: Hashable) -> None:
        """Post the receive of the next message, that of ``place``."""
        self._post(self._packet(self._formats.get(place, ()), trailer=True), place)

    def expected(self) -> Arrival | None:
        """What :meth:`take` will give, this very object (the one asked for last), if the message posted is as expected:
        its values are yet to come. None: that can't be said before."""
        assert self._posted is not None, "post before you expect"
        packet = self._posted.packet
        if packet.format and not self._link.is_staged:
            self._posted.arrival = _arrival(packet.tensors, packet.format)
        return self._posted.arrival

    def take(self) -> Arrival | None:
        """Wait for the message posted, and read it. None: the sender ended the stream."""
        posted = self._wait()
        status, self.acknowledged = posted.packet.read()
        if status == _END:
            return None
        if not status:
            if posted.arrival is not None:
                return posted.arrival
            return _arrival(self._link.arrived(posted.packet), posted.packet.format)
        description = self._exchange(self._link.buffer(status))
        actual = self._formats[posted.place] = decode(description)
        packet = self._packet(actual, trailer=True)
        self._exchange(packet.buffer)
        return _arrival(self._link.arrived(packet), actual)

    def prepare_gradients(self, expected: Format) -> None:
        """Make what :meth:`post_gradients` will need."""
        self._prepared = self._packet(expected, trailer=False)

    def post_gradients(self, expected: Format) -> None:
        """Post the receive of gradients: those of a message that this rank sent (:func:`gradient_format`)."""
        self._post(self._packet(expected, trailer=False), None)

    def take_gradients(self) -> list[Tensor]:
        return self._link.arrived(self._wait().packet)

    def _packet(self, format: Format, trailer: bool) -> Packet:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.fits(format, trailer):
            return prepared
        del prepared  # its memory, before there is more
        return self._link.packet(format, trailer)

    def _post(self, packet: Packet, place: Hashable) -> None:
        assert self._posted is None, "one receive at a time"
        self._posted = _Posted(self._link.irecv(packet.buffer), packet, place)

    def _wait(self) -> _Posted:
        assert self._posted is not None, "post before you take"
        self._link.wait(self._posted.work)
        posted, self._posted = self._posted, None
        return posted

    def _exchange(self, buffer: Tensor) -> Tensor:
        self._link.wait(self._link.irecv(buffer))
        return buffer


@dataclass(slots=True)
class _Posted:
    """A receive in flight.

    Attributes:
        arrival: handed out already, by :meth:`Receiver.expected`.
    """

    work: dist.Work
    packet: Packet
    place: Hashable
    arrival: Arrival | None = None


def _arrival(tensors: list[Tensor], format: Format) -> Arrival:
    return Arrival(tensors, [requires_grad for _, _, requires_grad in format])
