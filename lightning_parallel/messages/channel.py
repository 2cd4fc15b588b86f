"""Messages between neighbouring stages: outputs of layers go forward, their gradients come back.

This describes messages over gloo. Over NCCL each message is announced from host to host (``announced.py``).

The *format* of a message (shapes, dtypes, which tensors want a gradient) is not sent along. For each place in the
schedule, the sender and the receiver both remember the format of the last message there, and expect the next one to be
the same. So a receive can be posted before the message is made, without an extra message. Where a message is different
(the last, smaller batch; a longer sequence), its sender says so in the first word, and sends the format and the tensors
after it::

    as expected     [ tensors ............ | 0, a ]
    otherwise       [ as long, no contents | n, a ]  [ format, n bytes ]  [ tensors | 0, a ]
    end of stream   [ as long, no contents | -1, a ]

Both sides know the format of gradients, which follows from that of the activations. Their first word counts those on
which the loss doesn't depend; their indices follow::

    as expected     [ gradients .......... | 0, 0 ]
    otherwise       [ gradients .......... | n, 0 ]  [ n indices ]

In each direction only one receive is posted ahead, since a format is known only once the message before it has been
read. It is in flight while the stage computes, which hides its latency. Waiting holds up this stage and all later ones,
so the buffer of the next message is allocated before.

gloo can't tell whether a send is done except by waiting for it. So a sender keeps a buffer until something proves that
its message arrived (:meth:`Sender.confirm`). The gradient of a microbatch proves that its activation arrived. The
second word, a, counts the gradients that had arrived when the activation was sent. So the number of buffers is bounded
by what is in flight. They are used again for messages of the same format, since the system takes longer to give fresh
memory than to copy into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.messages.message import Format, Packet, decode, encode, format_of
from lightning_parallel.messages.posting import PostsDirectly, PostsFromThread
from lightning_parallel.messages.streams import Streams
from lightning_parallel.private.torch import not_recorded
from lightning_parallel.ranks.collectives import PeerLostError
from lightning_parallel.ranks.groups import Wire

END = -1  # in the place of a format's length


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

    def isend(self, buffer: Tensor) -> dist.Work:
        """Post a send of a flat buffer."""
        return self._post(self._group.send, buffer)

    def irecv(self, buffer: Tensor) -> dist.Work:
        """Post a receive into a flat buffer."""
        return self._post(self._group.recv, buffer)

    def _post(self, function: Callable[..., dist.Work], buffer: Tensor) -> dist.Work:
        # A message over gloo that a profiler has seen writes its end into the trace when it is waited for. Messages may
        # outlive a trace, whose memory is then somebody else's.
        try:
            with not_recorded() if buffer.device.type == "cpu" else nullcontext():
                return function([buffer], self._peer, self._tag)
        except RuntimeError as error:
            raise self._lost() from error

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


def indices_of(missing: Sequence[int]) -> list[Tensor]:
    """The indices of missing gradients as parts of a message: one tensor of int64, or nothing if none is missing."""
    return [torch.tensor(missing)] if missing else []


def indices_from(link: Link, count: int) -> list[int]:
    """Receive ``count`` indices. With none, no message comes."""
    if not count:
        return []
    indices = torch.empty(count, dtype=torch.int64)
    link.wait(link.irecv(indices))
    return indices.tolist()


class Sender:
    """Sends messages over a link, in order. ``poster`` posts the sends; by default it is a thread of its own. ``sent``
    is the number of messages since the start."""

    def __init__(self, link: Link, poster: PostsFromThread | PostsDirectly | None = None) -> None:
        self.sent = 0
        self._link = link
        self._formats: dict[Hashable, Format] = {}
        self._poster = PostsFromThread(link.isend) if poster is None else poster
        self._unconfirmed: deque[tuple[Packet | Tensor, ...]] = deque()
        self._idle: deque[Packet] = deque()  # of messages that have arrived

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        """Send tensors as the message of a place in the schedule, and return the message's format.

        Args:
            place: any key that the receiver uses too.
            acknowledged: the number of gradient messages that came back so far.
        """
        format, expected = format_of(tensors), self._formats.get(place, ())
        message = self._fill(self._packet(format, trailer=True), tensors, (0, acknowledged))
        if format == expected:
            self._post(message)
        else:
            description = encode(format)
            first = self._packet(expected, trailer=True).fill((), (description.numel(), acknowledged))
            self._post(first, description, message)
            self._formats[place] = format
        return format

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        """Answer the receive that the peer has posted for ``place``: this message won't come."""
        self._post(self._packet(self._formats.get(place, ()), trailer=True).fill((), (END, acknowledged)))

    def send_gradients(self, gradients: Sequence[Tensor], missing: Sequence[int] = ()) -> None:
        """Send gradients, whose format the receiver knows, and the indices of those that are ``missing``. Without
        gradients nothing is sent, but it counts as a message.

        They are copied first: other tensors may share their memory, and be written to. In ``x + p[None]`` autograd
        takes one memory for the gradients of x and p, and adds the next microbatch's gradient of p to it.
        """
        if gradients:
            packet = self._packet(format_of(gradients), trailer=True)
            self._post(self._fill(packet, gradients, (len(missing), 0)), *indices_of(missing))
        else:
            self._post()

    def confirm(self, messages: int) -> None:
        """Release the buffers of this many messages, counted from the start: the peer is known to have received
        them."""
        while self.sent - len(self._unconfirmed) < messages and self._unconfirmed:
            for part in self._unconfirmed.popleft():
                self._link.wait(self._poster.posted())
                if isinstance(part, Packet):
                    self._idle.append(part)

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived."""
        self.confirm(self.sent - keep)

    def _post(self, *parts: Packet | Tensor) -> None:
        """Send packets, and tensors that aren't the sender's, one after the other, as one message."""
        self.sent += 1
        self._unconfirmed.append(parts)
        copied = self._link.streams.copied() if self._link.through_host else None
        for part in parts:
            self._poster.hand(part.buffer if isinstance(part, Packet) else part, copied)

    def _fill(self, packet: Packet, tensors: Sequence[Tensor], words: tuple[int, int] | None = None) -> Packet:
        """Copy tensors into a packet. If they go through the host they are copied on the device first: copies to the
        host are only launched, and layers that are launched later may write to the tensors' memory without waiting for
        them."""
        if not self._link.through_host:
            return packet.fill(tensors, words)
        copies = [tensor.detach().clone() for tensor in tensors]
        with self._link.streams.outgoing(copies):
            return packet.fill(copies, words, wait=False)

    def _packet(self, format: Format, trailer: bool) -> Packet:
        """An idle packet, or else a new one in the place of the longest-idle one of another format: there are never
        more packets than have been in flight at a time."""
        for i, packet in enumerate(self._idle):
            if packet.format == format and packet.trailer == trailer:
                del self._idle[i]
                return packet
        if self._idle:
            self._idle.popleft()
        return Packet(format, trailer, self._link.device, self._link.through_host)


class Receiver:
    """Receives messages over a link, in order. One receive is posted ahead. ``acknowledged`` is the number of gradient
    messages that the peer had received when it sent the last message taken."""

    def __init__(self, link: Link) -> None:
        self.acknowledged = 0
        self._link = link
        self._formats: dict[Hashable, Format] = {}
        # A receive in flight, with its message's place in the schedule; None for gradients.
        self._posted: tuple[dist.Work, Packet, Hashable] | None = None

    # -- activations ---------------------------------------------------------------------------------------------

    def post(self, place: Hashable) -> None:
        """Post the receive of the next message, that of ``place``, unless one is posted."""
        if self._posted is None:
            self._begin(self._packet(self._formats.get(place, ()), trailer=True), place)

    def take(self, then: Hashable = None) -> Arrival | None:
        """Wait for the posted message, read it, and post the receive of the next one, that of place ``then`` (None:
        post nothing). Returns what arrived; None if the sender ended the stream."""
        following = None if then is None else self._packet(self._formats.get(then, ()), trailer=True)
        packet, place = self._wait()
        status, self.acknowledged = packet.words()
        arrival: Arrival | None = None
        if status == 0:
            arrival = Arrival(self._on_device(packet), packet.format)
        elif status != END:
            arrival = self._take_described(status, place)
        if following is not None:
            format = self._formats.get(then, ())  # a described message may have changed it
            self._begin(following if following.format == format else self._packet(format, trailer=True), then)
        return arrival

    def _take_described(self, nbytes: int, place: Hashable) -> Arrival:
        description = torch.empty(nbytes, dtype=torch.uint8)
        self._link.wait(self._link.irecv(description))
        format = self._formats[place] = decode(description)
        packet = self._packet(format, trailer=True)
        self._link.wait(self._link.irecv(packet.buffer))
        return Arrival(self._on_device(packet), format)

    # -- gradients -----------------------------------------------------------------------------------------------

    def post_gradients(self, format: Format) -> None:
        """Post the receive of gradients (:func:`.message.gradient_format`), unless one is posted."""
        if self._posted is None:
            self._begin(self._packet(format, trailer=True), None)

    def take_gradients(self, then: Format = ()) -> tuple[list[Tensor], list[int]]:
        """Wait for the posted gradients, and post the receive of the next ones, of format ``then`` (empty: post
        nothing). Returns them, and the indices of those that are missing."""
        following = self._packet(then, trailer=True) if then else None
        packet, _ = self._wait()
        missing = indices_from(self._link, packet.words()[0])
        if following is not None:
            self._begin(following, None)
        return self._on_device(packet), missing

    # -- both ----------------------------------------------------------------------------------------------------

    def _packet(self, format: Format, trailer: bool) -> Packet:
        with self._link.streams.incoming():
            return Packet(format, trailer, self._link.device, self._link.through_host)

    def _begin(self, packet: Packet, place: Hashable) -> None:
        with self._link.streams.incoming():
            self._posted = self._link.irecv(packet.buffer), packet, place

    def _wait(self) -> tuple[Packet, Hashable]:
        assert self._posted is not None, "post before you take"
        (work, packet, place), self._posted = self._posted, None
        with self._link.streams.incoming():
            self._link.wait(work)
        return packet, place

    def _on_device(self, packet: Packet) -> list[Tensor]:
        """The tensors of a received packet, on this link's device."""
        with self._link.streams.incoming():
            buffer = packet.buffer.to(self._link.device, non_blocking=True)
        self._link.streams.arrived(buffer)
        return packet.views(buffer)
