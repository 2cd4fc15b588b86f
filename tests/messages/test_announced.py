"""A sender keeps no more of the messages that it announces than it must. That they arrive: ``test_channel.py``."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements, AnnouncingSender
from lightning_parallel.messages.channel import Link
from lightning_parallel.ranks.groups import Wire
from tests.messages.test_channel import CPU, tensor, wanting
from tools.workers.pool import WorkerPool


def links() -> tuple[Link, Link]:
    """For messages, and for announcements."""
    peer = 1 - dist.get_rank()
    group, host = (dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2))
    return Link(Wire(group, 0), peer, "the peer", CPU), Link(Wire(host, 0), peer, "the peer", CPU)


def written_again() -> list[float] | None:
    """A layer that writes each output where the last one lay."""
    made = links()
    if dist.get_rank() == 0:
        sender = AnnouncingSender(*made)
        held: list[Tensor] = []
        sender._launch = lambda buffer, copied: held.append(buffer) or Future()  # type: ignore[func-returns-value]
        sender._leaving = deque(maxlen=0)  # nothing has been sent yet
        output = torch.zeros(2)
        for number in range(3):
            sender.send([output.fill_(number)], 0)
        return [float(buffer.view(torch.float32)[0]) for buffer in held]
    return None


def test_what_is_sent_is_what_a_layer_returned_also_where_it_writes_again(pool: WorkerPool) -> None:
    assert pool.run(written_again, 2)[0] == [0.0, 1.0, 2.0]


def kept_announcements() -> list[int] | None:
    """The announcements that are kept for messages without proof of arrival."""
    if dist.get_rank() == 0:
        sender = AnnouncingSender(*links())
        kept = []
        for i in range(4):
            sender.send(wanting(tensor(i, 3)), 0)
            sender.confirm(i)
            kept.append(len(sender._unconfirmed))
        sender.flush()
        return [*kept, len(sender._unconfirmed)]
    receiver = AnnouncedReceiver(*links(), Announcements())
    for _ in range(4):
        receiver.expect(0)
        receiver.take()
    return None


def test_announcements_are_kept_as_long_as_their_messages(pool: WorkerPool) -> None:
    assert pool.run(kept_announcements, 2)[0] == [1, 1, 1, 1, 0]


class Unread:
    """An announcement that the peer has not received yet: whoever waits for it is stuck."""

    def wait(self) -> None:
        raise AssertionError("the host waits for the peer's host")


def test_a_message_that_has_left_makes_nobody_wait_for_its_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small message may be done before the peer has launched its receive. In interleaved schedules hosts that waited
    here waited for each other."""
    monkeypatch.setattr(dist, "get_group_rank", lambda group, peer: peer)
    link, announcements = (Link(Wire(None, 0), 0, "the peer", CPU) for _ in range(2))  # type: ignore[arg-type]
    monkeypatch.setattr(announcements, "isend", lambda buffer: Unread())
    monkeypatch.setattr(announcements, "wait", lambda work: work.wait())
    done: Any = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(link, "isend", lambda buffer: done)
    sender = AnnouncingSender(link, announcements)
    for _ in range(3):
        sender.send([torch.ones(3)], 0)
    assert len(sender._leaving) == 1 and len(sender._unconfirmed) == 3
    with pytest.raises(AssertionError, match="the host waits"):
        sender.confirm(1)  # once its gradient has come, it has been read
