"""On a GPU a message's copies and receives are ordered with the layers that they belong to, and with no others.

There is no GPU here. The streams only write down what would be ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline import channel
from lightning_parallel.pipeline.channel import Receiver, Sender
from lightning_parallel.pipeline.message import Format, Packet
from lightning_parallel.pipeline.posting import PostsDirectly
from lightning_parallel.pipeline.streams import Streams

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Stream:
    """It has a name, and a diary that all share."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def wait_stream(self, other: Stream) -> None:
        self.diary.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"event of {self.name}"


class Buffer:
    def __init__(self, diary: list[str], device: torch.device = GPU) -> None:
        self.diary, self.device = diary, device

    def record_stream(self, stream: Stream) -> None:
        self.diary.append(f"memory is used on {stream.name}")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    names = iter(["incoming", "outgoing"])
    current = [Stream("compute", found)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), found))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    return found


def test_a_copy_to_the_host_waits_for_the_layers_before_it_and_keeps_their_memory(diary: list[str]) -> None:
    streams = Streams(GPU)
    tensors: list[Any] = [Buffer(diary), Buffer(diary, CPU)]
    with streams.outgoing(tensors):
        diary.append(f"copy on {torch.cuda.current_stream(GPU).name}")  # type: ignore[attr-defined]
    assert diary == ["outgoing waits for compute", "copy on outgoing", "memory is used on outgoing"]
    assert str(streams.copied()) == "event of outgoing"


def test_a_receive_waits_for_no_layer_and_layers_wait_for_it(diary: list[str]) -> None:
    streams = Streams(GPU)
    buffer: Any = Buffer(diary)
    with streams.incoming():
        diary.append(f"receive on {torch.cuda.current_stream(GPU).name}")  # type: ignore[attr-defined]
    streams.arrived(buffer)
    assert diary == ["receive on incoming", "compute waits for incoming", "memory is used on compute"]


def test_on_a_cpu_nothing_is_ordered() -> None:
    streams = Streams(CPU)
    with streams.incoming(), streams.outgoing([torch.ones(1)]):
        streams.arrived(torch.ones(1))
    assert streams.copied() is None


class Copy:
    """A GPU's copy to the host, which ends when the test says so."""

    def __init__(self) -> None:
        self.ends = Event()

    def synchronize(self) -> None:
        self.ends.wait(10)


class Link:
    """Of a stage that shares its GPU with others: its messages go through the host."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.through_host = True
        self.sent: list[Tensor] = []
        self.streams: Any = Streams(CPU)

    def isend(self, buffer: Tensor) -> dist.Work:
        self.sent.append(buffer)
        return dist.Work()

    def wait(self, work: dist.Work) -> None:
        pass

    def irecv(self, buffer: Tensor) -> dist.Work:
        buffer.fill_(0)
        return dist.Work()


class HostPacket(Packet):
    """Host memory takes the place of pinned memory."""

    def __init__(self, format: Format, trailer: bool, device: torch.device, pinned: bool = False) -> None:
        super().__init__(format, trailer, CPU)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(channel, "Packet", HostPacket)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return Link()


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_a_message_leaves_when_it_has_been_copied_to_the_host_and_the_stage_goes_on(link: Link, kind: str) -> None:
    copy = Copy()
    link.streams.copied = lambda: copy
    sender = Sender(link)  # type: ignore[arg-type]
    if kind == "gradient":
        sender.send_gradients([torch.ones(3)])
    else:
        sender.send([torch.ones(3)], 0)
    assert link.sent == []  # and the stage is here, not waiting
    copy.ends.set()
    sender.flush()
    assert link.sent[-1][:12].view(torch.float32).tolist() == [1.0] * 3


def test_what_arrives_through_the_host_is_copied_to_the_device_beside_the_layers(link: Link) -> None:
    done: list[str] = []
    link.streams.arrived = lambda buffer: done.append(buffer.device.type)
    receiver = Receiver(link)  # type: ignore[arg-type]
    receiver.post_gradients((((3,), torch.float32, False),))
    (gradient,) = receiver.take_gradients()
    assert gradient.device.type == "meta" and done == ["meta"]


class Sending:
    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done, "the host waits"


def test_between_gpus_the_memory_of_a_message_is_free_when_it_has_left(link: Link) -> None:
    link.through_host = False
    works = [Sending() for _ in range(4)]
    sender = Sender(link)  # type: ignore[arg-type]
    sender._poster = PostsDirectly(lambda buffer: works[sender.sent - 1])  # type: ignore[arg-type, return-value]
    held = []
    for number in range(4):
        sender.send_gradients([torch.ones(3)])
        held.append(len(sender._unconfirmed))
        works[number // 2].done = True  # send 0 after message 0, send 1 after message 2
    assert held == [1, 1, 2, 2]
