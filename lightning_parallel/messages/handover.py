"""A cut between two chunks of one stage: what one sends, the other takes in this process.

It stands in the place of a sender and a receiver over a link (``channel.py``), for one kind of message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from torch import Tensor

from lightning_parallel.messages.message import Format, format_of


class Handover:
    """Messages from one chunk of this stage to the next, or back.

    Attributes:
        sent, taken, acknowledged: always 0, where a link's ends count messages: no buffers depend on them here.
    """

    sent = taken = acknowledged = 0

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Tensor], Format]] = deque()

    def send(self, tensors: Sequence[Tensor], place: Hashable, acknowledged: int = 0) -> Format:
        """Hand over copies, as :meth:`.Sender.send` does: the next chunk may change its input in place. Returns their
        format."""
        format = format_of(tensors)
        self._messages.append(([tensor.detach().clone() for tensor in tensors], format))
        return format

    def take(self) -> tuple[list[Tensor], Format] | None:
        """The oldest message that hasn't been taken; None if there is none, as where a stream has ended."""
        return self._messages.popleft() if self._messages else None

    def drop(self) -> None:
        """Forget the messages that haven't been taken."""
        self._messages.clear()

    def expect(self, *_: object, **__: object) -> None:
        """Does nothing, as the other three: no receive is to be posted, no buffer to be given back, all messages have
        arrived, and no chunk waits for one that won't come."""

    confirm = flush = end = expect
