"""Messages between neighbouring stages: outputs of layers go forward, their gradients come back.

This describes messages over gloo. Over NCCL each message is announced from host to host (``announced.py``).

The *format* of a message (shapes, dtypes, which tensors want a gradient) is not sent along. For each place in the
schedule, the sender and the receiver both remember the format of the last message there, and expect the next one to be
the same. The format of gradients follows from that of the activations. So a receive can be posted before the message is
made, without an extra message. Where a message is different (the last, smaller batch; a longer sequence; a gradient
that doesn't exist), its sender says so in the first word, and sends the format and the tensors after it::

    as expected     [ tensors ............ | 0, a ]
    otherwise       [ as long, no contents | n, a ]  [ format, n bytes ]  [ tensors | 0, a ]
    end of stream   [ as long, no contents | -1, a ]

A receiver is told what it can expect. Only the receive of the next message is posted, since a format is known only once
the message before it has been read. It is in flight while the stage computes, which hides its latency.

gloo can't tell whether a send is done except by waiting for it. So a sender keeps a buffer until something proves that
its message arrived (:meth:`Sender.confirm`). The gradient of a microbatch proves that its activation arrived. The
second word, a, counts the gradients that had arrived when the activation was sent. So the number of buffers is bounded
by what is in flight. They are used again for messages of the same format, since the system takes longer to give fresh
memory than to copy into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.message import Format, Packet, decode, encode, format_of, views
from lightning_parallel.messages.posting import Post, Posted, posts_from_thread
from lightning_parallel.messages.streams import Streams
from lightning_parallel.private.torch.tensors import record_operations
from lightning_parallel.ranks.collectives import PeerLostError
from lightning_parallel.ranks.groups import Wire

END_OF_STREAM = -1  # in the place of a format's length


class Link:
    """One direction between this rank and a neighbour.

    Over gloo, tensors on a GPU travel through pinned host memory, so several stages may share one GPU. Over NCCL they
    travel directly.

    Args:
        peer_name: the neighbour's name in errors.
        device: the device of the messages: this stage's, or the host.
        streams: the device's streams; by default the link makes its own.
    """

    def __init__(
        self, wire: Wire, peer: int, peer_name: str, device: torch.device, streams: Streams | None = None
    ) -> None:
        self._group, self._tag = wire.group, wire.tag
        self._peer = dist.get_group_rank(wire.group, peer)  # dist.isend and irecv would look it up for each message
        self._peer_name = peer_name
        self.device = device
        self.streams = Streams(device) if streams is None else streams
        self.through_host = device.type != "cpu" and wire.host_group is None
        self._has_host_buffers = device.type == "cpu" or self.through_host

    def isend(self, buffer: Tensor) -> dist.Work:
        """Post a send of a flat buffer."""
        return self._post(self._group.send, buffer)

    def irecv(self, buffer: Tensor) -> dist.Work:
        """Post a receive into a flat buffer."""
        return self._post(self._group.recv, buffer)

    def _post(self, function: Callable[..., dist.Work], buffer: Tensor) -> dist.Work:
        # A message over gloo that a profiler has seen writes its end into the trace when it is waited for. Messages may
        # outlive a trace, whose memory is then somebody else's.
        if self._has_host_buffers:
            record_operations(False)
        try:
            return function([buffer], self._peer, self._tag)
        except RuntimeError as error:
            raise self._lost() from error
        finally:
            if self._has_host_buffers:
                record_operations(True)

    def wait(self, work: dist.Work) -> None:
        """Wait until a send or a receive is done.

        Raises:
            PeerLostError: the neighbour is gone.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> PeerLostError:
        return PeerLostError(
            f"The link to {self._peer_name} broke: that stage stopped, or did not answer within the timeout. "
            f"The cause is in its own output."
        )


def received_format(link: Link, nbytes: int) -> Format:
    """Receive the description of a format."""
    description = torch.empty(nbytes, dtype=torch.uint8)
    link.wait(link.irecv(description))
    return decode(description)


class _LinkEnd:
    """An end of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._formats: dict[Hashable, Format] = {}  # of the last messages, by place

    def _expected(self, place: Hashable) -> Format:
        """The format of a place's next message, if it is as expected. Where the format is known, it is the place; a
        gradient that didn't exist is expected not to exist again."""
        return self._formats.get(place, place if isinstance(place, tuple) else ())


class Sender(_LinkEnd):
    """Sends messages over a link, in order. ``post`` posts the sends; by default from a thread of its own. ``sent`` is
    the number of messages since the start."""

    def __init__(self, link: Link, post: Post | None = None) -> None:
        super().__init__(link)
        self.sent = 0
        self._isend = posts_from_thread(link.isend) if post is None else post
        # By message, what was posted for it.
        self._unconfirmed: deque[list[tuple[Packet | Tensor, Posted]]] = deque()
        self._idle: deque[Packet] = deque()  # of messages that have arrived

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        """Send tensors as the message of a place in the schedule, and return the message's format.

        They are copied first: layers may go on to write to them, and gradients may share their memory. In
        ``x + p[None]`` autograd takes one memory for the gradients of x and p, and adds the next microbatch's gradient
        of p to it.

        Args:
            place: any key that the receiver uses too; or the format that it expects.
            acknowledged: the number of gradient messages that came back so far.
        """
        format, expected = format_of(tensors), self._expected(place)
        message, words = self._packet(format), (0, acknowledged)
        if self._link.through_host:
            # On the device first: copies to the host are only launched, and layers that are launched later may write to
            # the tensors' memory without waiting for them.
            tensors = [tensor.detach().clone() for tensor in tensors]
            with self._link.streams.outgoing(tensors):
                message.fill(tensors, words, wait=False)
        else:
            message.fill(tensors, words)
        if format == expected:
            self._post(message)
        else:
            description = encode(format)
            first = self._packet(expected).fill((), (description.numel(), acknowledged))
            self._post(first, description, message)
            self._formats[place] = format
        return format

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        """Answer the receive that the peer has posted for ``place``: this message won't come."""
        self._post(self._packet(self._expected(place)).fill((), (END_OF_STREAM, acknowledged)))

    def confirm(self, messages: int) -> None:
        """Release the buffers of this many messages, counted from the start: the peer is known to have received
        them."""
        while self.sent - len(self._unconfirmed) < messages and self._unconfirmed:
            for part, posted in self._unconfirmed.popleft():
                self._link.wait(posted())
                if isinstance(part, Packet):
                    self._idle.append(part)

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived."""
        self.confirm(self.sent - keep)

    def _post(self, *parts: Packet | Tensor) -> None:
        """Send packets, and tensors that aren't the sender's, one after the other, as one message."""
        self.sent += 1
        copied = self._link.streams.copied() if self._link.through_host else None
        self._unconfirmed.append(
            [(part, self._isend(part.buffer if isinstance(part, Packet) else part, copied)) for part in parts]
        )

    def _packet(self, format: Format) -> Packet:
        """An idle packet, or else a new one in the place of the longest-idle one of another format: there are never
        more packets than have been in flight at a time."""
        for i, packet in enumerate(self._idle):
            if packet.format == format:
                del self._idle[i]
                return packet
        if self._idle:
            self._idle.popleft()
        return Packet(format, True, self._link.device, self._link.through_host)


class Receiver(_LinkEnd):
    """Receives messages over a link, in order. ``taken`` is the number of messages so far, and ``acknowledged`` that of
    gradient messages which the peer had received when it sent the last of them."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.taken = self.acknowledged = 0
        self._coming: deque[Hashable] = deque()  # places in the schedule of messages that haven't been taken
        self._posted: tuple[dist.Work, Packet] | None = None  # the receive of the first of them

    def expect(self, place: Hashable) -> None:
        """One more message will come, that of ``place``, after those that are expected already. Its receive is posted
        now if it is the first, otherwise when the one before it has been taken."""
        self._coming.append(place)
        if self._posted is None:
            with self._link.streams.incoming:
                self._posted = self._receive(place)

    def take(self) -> tuple[list[Tensor], Format] | None:
        """Wait for the next message, and read it. Returns its tensors and their format; None if the sender ended the
        stream, after which no more is expected."""
        assert self._posted is not None, "expect before you take"
        (work, packet), place, link = self._posted, self._coming.popleft(), self._link
        self._posted = None
        with link.streams.incoming:
            link.wait(work)
            self.taken += 1
            status, self.acknowledged = packet.words()
            if status > 0:
                self._formats[place] = received_format(link, status)
                work, packet = self._receive(place)
                link.wait(work)
            buffer = packet.buffer.to(link.device, non_blocking=True)
            if status == END_OF_STREAM:
                self._coming.clear()
            if self._coming:
                self._posted = self._receive(self._coming[0])
        if status == END_OF_STREAM:
            return None
        if buffer is packet.buffer:
            return packet.tensors, packet.format
        link.streams.arrived(buffer)
        return views(buffer, packet.format), packet.format

    def drop(self) -> None:
        """Take messages until none is expected, or until the sender ends the stream."""
        while self._coming:
            self.take()

    def _receive(self, place: Hashable) -> tuple[dist.Work, Packet]:
        """Post the receive of a place's next message, or of the part of it that is received ahead."""
        packet = Packet(self._expected(place), True, self._link.device, self._link.through_host)
        return self._link.irecv(packet.buffer), packet
