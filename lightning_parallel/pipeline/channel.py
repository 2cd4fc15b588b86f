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
computes, which hides its latency.

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
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.crossing import Arrival
from lightning_parallel.pipeline.message import (
    TRAILER,
    Format,
    decode,
    encode,
    format_of,
    read_trailer,
    size_of,
    unpack,
    write_trailer,
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
        self._staged = device.type != "cpu" and dist.get_backend(group) == "gloo"

    def buffer(self, nbytes: int) -> Tensor:
        if self._staged:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def arrived(self, buffer: Tensor) -> Tensor:
        """A received buffer, where this stage computes."""
        return buffer.to(self.device) if self._staged else buffer

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
        Thread(target=_post_all, args=(link, self._handed, self._posted), name="send", daemon=True).start()
        weakref.finalize(self, self._handed.put, None)

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
        self._unconfirmed: deque[_Message] = deque()
        self._confirmed = 0  # messages known to have arrived
        self._idle: deque[Tensor] = deque()  # buffers of messages that have arrived

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
            announcement = self._packed((), expected, (description.numel(), acknowledged))
            self._post(announcement, self._buffer(description.numel()).copy_(description), message)
            self._formats[place] = actual
        return actual

    def end(self, place: Hashable, acknowledged: int = 0) -> None:
        """Answer the receive that the peer has posted for ``place``: there will be no such message."""
        self._post(self._packed((), self._formats.get(place, ()), (_END, acknowledged)))

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Send gradients, whose format the receiver knows. None: no message."""
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.is_contiguous() and only.is_cpu and not only.is_complex():
            self._post(only.detach(), own=False)  # as it lies in memory: a message needs no copy
        elif gradients:
            self._post(self._packed(gradients, format_of(gradients), None))
        else:
            self._post()

    def confirm(self, messages: int) -> None:
        """The peer is known to have received this many messages since the start: release their buffers."""
        while self._confirmed < messages and self._unconfirmed:
            message = self._unconfirmed.popleft()
            for buffer in message.buffers:
                self._link.wait(self._courier.posted())
                if message.own:
                    self._idle.append(buffer)
            self._confirmed += 1

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived."""
        self.confirm(self._confirmed + len(self._unconfirmed) - keep)

    def _post(self, *buffers: Tensor, own: bool = True) -> None:
        """Send buffers, one after the other, as one message."""
        self._unconfirmed.append(_Message(buffers, own))
        for buffer in buffers:
            self._courier.hand(buffer)

    def _packed(self, tensors: Sequence[Tensor], format: Format, trailer: tuple[int, int] | None) -> Tensor:
        """A buffer laid out for ``format``, with ``tensors`` in their places; none: its contents are void."""
        buffer = self._buffer(size_of(format) + (TRAILER if trailer else 0))
        for place, tensor in zip(unpack(buffer, format), tensors, strict=False):
            place.copy_(tensor.detach())
        if trailer:
            write_trailer(buffer, trailer)
        return buffer

    def _buffer(self, nbytes: int) -> Tensor:
        """One that is idle, or else a new one in the place of the longest idle: there are never more than have been in
        flight at a time."""
        for i, buffer in enumerate(self._idle):
            if buffer.numel() == nbytes:
                del self._idle[i]
                return buffer
        if self._idle:
            self._idle.popleft()
        return self._link.buffer(nbytes)


@dataclass(frozen=True, slots=True)
class _Message:
    """What the peer isn't known to have received.

    Attributes:
        own: the buffers are the sender's, to be used again.
    """

    buffers: tuple[Tensor, ...]
    own: bool


class Receiver:
    """Receives messages over a link, in order, one posted ahead."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._formats: dict[Hashable, Format] = {}
        self._posted: tuple[dist.Work, Tensor, Format, Hashable] | None = None
        self.acknowledged = 0  # gradient messages that the peer had received when it sent the last message taken

    @property
    def is_posted(self) -> bool:
        return self._posted is not None

    def post(self, place: Hashable) -> None:
        """Post the receive of the next message, that of ``place``."""
        expected = self._formats.get(place, ())
        self._post(expected, size_of(expected) + TRAILER, place)

    def take(self) -> Arrival | None:
        """Wait for the message posted, and read it. None: the sender ended the stream."""
        buffer, expected, place = self._wait()
        status, self.acknowledged = read_trailer(buffer)
        if status == _END:
            return None
        if status:
            description = self._exchange(status)
            expected = self._formats[place] = decode(description)
            buffer = self._exchange(size_of(expected) + TRAILER)
        tensors = unpack(self._link.arrived(buffer), expected)
        return Arrival(tensors, [requires_grad for _, _, requires_grad in expected])

    def post_gradients(self, expected: Format) -> None:
        """Post the receive of gradients: those of a message that this rank sent (:func:`gradient_format`)."""
        self._post(expected, size_of(expected), None)

    def take_gradients(self) -> list[Tensor]:
        buffer, expected, _ = self._wait()
        return unpack(self._link.arrived(buffer), expected)

    def _post(self, expected: Format, nbytes: int, place: Hashable) -> None:
        assert self._posted is None, "one receive at a time"
        buffer = self._link.buffer(nbytes)
        self._posted = (self._link.irecv(buffer), buffer, expected, place)

    def _wait(self) -> tuple[Tensor, Format, Hashable]:
        assert self._posted is not None, "post before you take"
        work, buffer, expected, place = self._posted
        self._link.wait(work)
        self._posted = None
        return buffer, expected, place

    def _exchange(self, nbytes: int) -> Tensor:
        buffer = self._link.buffer(nbytes)
        self._link.wait(self._link.irecv(buffer))
        return buffer
