"""On a GPU a message's copies and receives are ordered with the layers that they belong to, and with no others.

There is no GPU here. The streams only write down what would be ordered.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages import announced, channel
from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements
from lightning_parallel.messages.channel import Receiver, Sender
from lightning_parallel.messages.message import Format, Packet, encode, format_of
from lightning_parallel.messages.posting import posts_directly, posts_from_thread, short_switch_interval
from lightning_parallel.messages.streams import Streams
from tests.messages.test_rendezvous import Hosts

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Stream:
    """It has a name, and a diary that all share."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def wait_stream(self, other: Stream) -> None:
        self.diary.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: str) -> str:
        return f"{event} of {self.name}"


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    names = iter(["incoming", "outgoing"])
    current = [Stream("compute", found)]

    def event(*, blocking: bool) -> str:
        return "sleeping event" if blocking else "event"

    monkeypatch.setattr(torch.cuda, "Event", event)

    class On:  # may be entered again, as torch's
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            current.append(self.stream)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), found))
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    return found


def test_a_thread_that_waits_for_copies_to_the_host_sleeps(diary: list[str]) -> None:
    assert str(Streams(GPU).copied()) == "sleeping event of outgoing"


# -- the order in which a sender and a receiver launch -----------------------------------------------------------------

FORMAT = format_of([torch.ones(3)])
COMES = ["allocate on incoming", "receive on incoming", "wait on incoming"]
COPIED = "copy on incoming"
READ = ["compute waits for incoming", "memory is used on compute"]


class Ordered:
    """A link over which everything writes down the stream that it is launched on."""

    def __init__(self, diary: list[str], monkeypatch: pytest.MonkeyPatch, *, through_host: bool) -> None:
        self.device, self.through_host = torch.device("meta"), through_host
        self.coming: list[Tensor] = []  # the ends of what the next receives bring
        self.streams = Streams(GPU)
        self.streams._device = CPU  # where the tensors are here

        def note(what: str) -> None:
            diary.append(f"{what} on {torch.cuda.current_stream(GPU).name}")  # type: ignore[attr-defined]

        class NotingPacket(Packet):
            """Host memory takes the place of pinned memory."""

            def __init__(self, format: Format, trailer: bool, *_: Any) -> None:
                if format:
                    note("allocate")
                super().__init__(format, trailer, CPU)

            def fill(self, *args: Any, **kwargs: Any) -> Packet:
                note("fill")
                return super().fill(*args, **kwargs)

        to = Tensor.to

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("non_blocking"):
                note("copy")
                return tensor.clone()
            return to(tensor, CPU)

        self._note = note
        monkeypatch.setattr(channel, "Packet", NotingPacket)
        monkeypatch.setattr(announced, "Packet", NotingPacket)
        monkeypatch.setattr(Tensor, "to", moved)
        monkeypatch.setattr(
            Tensor, "record_stream", lambda tensor, stream: diary.append(f"memory is used on {stream.name}")
        )

    def isend(self, buffer: Tensor) -> dist.Work:
        self._note("send")
        return dist.Work()

    def irecv(self, buffer: Tensor) -> dist.Work:
        self._note("receive")
        if self.coming:
            content = self.coming.pop(0).view(torch.uint8)
            buffer[-len(content) :] = content
        return dist.Work()

    def wait(self, work: dist.Work) -> None:
        self._note("wait")


def test_copies_to_the_host_are_launched_on_outgoing(diary: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a message leaves when it has been copied."""
    link: Any = Ordered(diary, monkeypatch, through_host=True)
    # Device -1 is none that the thread would have to change to.
    link.streams.copied = lambda: SimpleNamespace(device=-1, synchronize=lambda: diary.append("copied"))
    sender = Sender(link)
    sender.send([torch.ones(3)], FORMAT)
    sender.flush()
    by_thread = [entry for entry in diary if entry.startswith(("copied", "send"))]
    assert [entry.split()[0] for entry in by_thread] == ["copied", "send"]
    sent = [entry for entry in diary if entry not in by_thread and not entry.startswith("wait")]
    assert sent[1:] == ["outgoing waits for compute", "fill on outgoing", "memory is used on outgoing"]


def test_activations_through_the_host_are_received_and_copied_to_the_device_on_incoming(
    diary: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Any = Ordered(diary, monkeypatch, through_host=True)
    receiver = Receiver(link)
    described = ["receive on incoming", "wait on incoming"]  # in host memory, where streams count for nothing
    words = torch.tensor([len(encode(FORMAT)), 0]), torch.tensor([0, 0])
    for coming, before in (([words[0], encode(FORMAT)], [*COMES[1:], *described]), ([words[1]], [])):
        link.coming = coming
        receiver.expect(0)
        assert diary[-1] == "receive on incoming"
        receiver.take()
        assert diary == [*before, *COMES, COPIED, *READ]
        diary.clear()


def test_announced_activations_are_received_on_incoming(diary: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = Ordered(diary, monkeypatch, through_host=False)
    hosts: Any = Hosts()
    for part in (torch.tensor([len(encode(FORMAT)), 0]), encode(FORMAT), torch.tensor([0, 0])):
        hosts.isend(part.view(torch.uint8))
    receiver = AnnouncedReceiver(link, hosts, Announcements())
    for _ in range(2):
        receiver.expect(0)
        assert diary == []  # only what is announced is launched
        receiver.take()
        assert diary == COMES + READ
        diary.clear()


# -- sends are posted in the order in which they were handed over ------------------------------------------------------


class Link:
    """Posts sends, and remembers from which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def send(self, buffer: Tensor) -> dist.Work:
        self.threads.append(threading.current_thread().name)
        if buffer.item() < 0:
            raise RuntimeError("no luck")
        return cast("dist.Work", buffer)


@pytest.mark.parametrize("kind", [posts_from_thread, posts_directly])
def test_sends_come_back_in_the_order_of_handing_them_over_and_an_error_where_it_is_asked_for(kind: Any) -> None:
    link = Link()
    post = kind(link.send)
    posted = [post(torch.tensor(number), None) for number in (0, 1, -1, 3)]
    assert [int(each()) for each in posted[:2]] == [0, 1]
    with pytest.raises(RuntimeError, match="no luck"):
        posted[2]()
    assert int(posted[3]()) == 3  # later ones go on
    assert (set(link.threads) == {threading.current_thread().name}) == (kind is posts_directly)


def test_a_stage_does_not_wait_for_the_copy_of_what_it_sends() -> None:
    link, copied = Link(), threading.Event()
    event: Any = SimpleNamespace(device=-1, synchronize=lambda: link.threads.append(f"copied: {copied.wait(10)}"))
    post = posts_from_thread(link.send)
    posted = post(torch.tensor(1), event)
    copied.set()
    posted()
    assert link.threads == ["copied: True", "send"]


def test_a_sending_thread_gets_the_interpreter_soon_while_a_schedule_runs() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="no luck"), short_switch_interval():
        assert sys.getswitchinterval() <= 5e-5 < before
        raise RuntimeError("no luck")
    assert sys.getswitchinterval() == before
