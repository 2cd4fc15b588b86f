"""Messages between neighbours: they arrive as they were sent, whatever they hold, and leave nothing in memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements, AnnouncingSender
from lightning_parallel.messages.channel import Link, Receiver, Sender
from lightning_parallel.messages.message import Packet, format_of
from lightning_parallel.ranks.groups import Wire
from tools.workers.pool import WorkerPool

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


def link() -> Link:
    peer = 1 - dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    return Link(Wire(group, 0), peer, f"stage {peer} (rank {peer})", CPU)


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on both ranks."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values > 0 if dtype == torch.bool else values.to(dtype)


def wanting(*tensors: Tensor) -> list[Tensor]:
    return [t.requires_grad_() for t in tensors]


def stream() -> list[tuple[Any, list[Tensor]]]:
    """Messages of a run, with their places: shapes, dtypes, counts and flags change at the same place."""
    messages: list[tuple[Any, list[Tensor]]] = [(0, wanting(tensor(i, 4, 3))) for i in range(3)]
    messages += [(0, wanting(tensor(9, 2, 3))), (1, wanting(tensor(10, 4, 3))), (0, wanting(tensor(11, 4, 3)))]
    messages += [(0, [tensor(12, 4, 3)]), (0, wanting(tensor(13, 4, 3)))]  # the flag alone differs
    messages += [("evaluation", [tensor(20 + i, 1 + i, dtype=dtype)]) for i, dtype in enumerate(DTYPES)]
    messages += [(2, [tensor(40 + i, 3, dtype=dtype) for i, dtype in enumerate(DTYPES)]) for _ in range(2)]
    messages += [(3, []), (3, [tensor(50)]), (3, wanting(tensor(51))), (3, [])]  # nothing at all; 0-dim
    messages += [(4, [tensor(52, 0, 3), tensor(53, 2)]), (4, [tensor(54, 0)]), (4, wanting(tensor(55, 5, 0)))]
    messages += [(5, [tensor(60, 3, 4).t(), tensor(61, 1, 4).expand(3, 4), tensor(62, 6)[::2]])] * 2
    messages += [(6, [tensor(70, 300, 1000)]), (6, [tensor(71, 1)])]  # 1.2 MB, then little
    return messages


def described(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype, Any]]:
    return [(tuple(t.shape), t.dtype, t.tolist()) for t in (t.detach() for t in tensors)]


def gradients() -> list[tuple[Any, list[Tensor]]]:
    """Of sizes on both sides of the alignment, laid out in all ways, in the format that is expected and in others."""
    sizes = [1, 3, 15, 16, 17, 31, 32, 33, 1000]
    messages = [[tensor(i, n, dtype=dtype)] for i, n in enumerate(sizes) for dtype in DTYPES[:4]]
    messages += [[tensor(1)], [tensor(2, 0)], [tensor(3, 3, 4).t()], [tensor(4, 1).expand(7)]]
    messages += [[tensor(10, 1, 1).sum().expand(1, 1)], [torch.stack([tensor(11, 1)[0]], -1)[None].expand(1, 1)]]
    messages += [[tensor(12, 3, dtype=torch.complex64).conj()], [tensor(13, 3, dtype=torch.complex64)]]
    messages += [[tensor(14, 3, dtype=torch.complex64).conj().imag]]
    messages += [[tensor(5, 3), tensor(6, 2, dtype=torch.bfloat16)], [tensor(7, 0), tensor(8, 2)], [tensor(9, 8)[2:5]]]
    others = format_of([torch.ones(3)])
    return [((*format_of(message), *others[: i % 3 == 0]), message) for i, message in enumerate(messages)]


def ends(kind: str) -> tuple[Sender, Receiver]:
    """A sender and a receiver of this rank, of which one is used: over one link, or over one that is announced."""
    if kind == "gloo":
        own = link()
        return Sender(own), Receiver(own)
    own, hosts = link(), link()
    return AnnouncingSender(own, hosts), AnnouncedReceiver(own, hosts, Announcements())


def sends_and_receives(kind: str, ahead: bool) -> list[tuple[Any, list[bool], int]] | None:
    sender, receiver = ends(kind)
    messages = [*stream(), *gradients()]
    if dist.get_rank() == 0:
        for i, (place, tensors) in enumerate(messages):
            assert sender.send(tensors, place, acknowledged=i) == format_of(tensors)
            sender.confirm(i // 2)
        assert sender.sent == len(messages)
        sender.flush()
        return None
    places = [place for place, _ in messages]
    taken: list[Any] = []
    for place in places if ahead else ():
        receiver.expect(place)
    for place in places:
        if not ahead:
            receiver.expect(place)
        taken.append((receiver.take(), receiver.acknowledged))
    # Read at the end only: a message must not be overwritten by those after it.
    return [(described(tensors), [each.requires_grad for each in format], count) for (tensors, format), count in taken]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("kind", ["gloo", "announced"])
def test_messages_arrive_as_they_were_sent_whatever_changes(pool: WorkerPool, kind: str, ahead: bool) -> None:
    messages = [message for _, message in (*stream(), *gradients())]
    found = pool.run(sends_and_receives, 2, kind, ahead)[1]
    assert len(found) == len(messages)
    for i, (sent, (received, requires_grad, acknowledged)) in enumerate(zip(messages, found, strict=True)):
        assert received == described(sent), f"message {i}"
        assert requires_grad == [t.requires_grad for t in sent], f"message {i}"
        assert acknowledged == i


def test_a_tensor_lies_in_memory_as_it_did_unless_it_repeats_itself() -> None:
    tensors = [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, 2).T,
        torch.ones(1).expand(3),
    ]
    assert [t.stride() for t in Packet(format_of(tensors), False, CPU).tensors] == [(60, 1, 15, 3), (1, 2), (1,)]


def changes_what_it_sent() -> list[float] | None:
    """Nothing is known of messages that were sent: no buffer is used again, or what was sent would change."""
    if dist.get_rank() == 1:
        receiver = Receiver(link())
        found = []
        dist.barrier()  # by now the sender has changed its tensor
        for _ in range(4):
            receiver.expect(0)
            taken = receiver.take()
            assert taken is not None
            found.append(float(taken[0][0][0]))
        return found
    sender, output = Sender(link()), torch.empty(100_000)
    for i in range(4):
        sender.send([output.fill_(i)], 0)
        sender.confirm(0)
    dist.barrier()
    sender.flush()
    return None


def test_what_is_sent_may_be_changed_in_place_and_buffers_in_flight_are_left_alone(pool: WorkerPool) -> None:
    assert pool.run(changes_what_it_sent, 2)[1] == [0, 1, 2, 3]


@pytest.mark.gpu
def test_tensors_on_one_gpu_travel_through_pinned_memory(pool: WorkerPool) -> None:
    found = pool.run(sends_from_the_gpu, 2)[1]
    assert found == [(described([tensor(0, 5), tensor(1, 2)]), "cuda:0")] * 2


def sends_from_the_gpu() -> list[Any] | None:
    device = torch.device("cuda", 0)
    group = dist.new_group([0, 1])
    connection = Link(Wire(group, 0), 1 - dist.get_rank(), "the peer", device)
    tensors = [tensor(0, 5).to(device), tensor(1, 2).to(device)]
    if dist.get_rank() == 0:
        sender = Sender(connection)
        for _ in range(2):
            sender.send(tensors, 0)
        sender.flush()
        return None
    receiver = Receiver(connection)
    found = []
    for _ in range(2):
        receiver.expect(0)
        taken = receiver.take()
        assert taken is not None
        found.append((described([t.cpu() for t in taken[0]]), str(taken[0][0].device)))
    return found


def names_in_a_trace() -> set[str]:
    own, buffer = link(), torch.zeros(3)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        work = own.isend(buffer) if dist.get_rank() == 0 else own.irecv(buffer)
        own.wait(work)  # in the trace: afterwards it may crash
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    return {event.name for event in trace.events() or ()}


def test_a_profiler_sees_no_messages_which_may_outlive_its_trace(pool: WorkerPool) -> None:
    for names in pool.run(names_in_a_trace, 2):
        assert "aten::mm" in names
        assert not [name for name in names if "gloo" in name]


# -- a sender keeps no more of the messages that it announces than it must ---------------------------------------------


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
    left, done = list[Tensor](), SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(link, "isend", lambda buffer: left.append(buffer) or done)  # type: ignore[func-returns-value]
    sender, output = AnnouncingSender(link, announcements), torch.zeros(2)
    for number in range(3):
        sender.send([output.fill_(number)], 0)  # by a layer that writes each output where the last one lay
    assert [buffer.view(torch.float32)[0].item() for buffer in left] == [0.0, 1.0, 2.0]
    assert len(sender._leaving) == 1 and len(sender._unconfirmed) == 3
    with pytest.raises(AssertionError, match="the host waits"):
        sender.confirm(1)  # once its gradient has come, it has been read
    monkeypatch.setattr(announcements, "wait", lambda work: None)
    sender.confirm(2)
    assert len(sender._unconfirmed) == 1
    sender.flush()
    assert not sender._leaving and not sender._unconfirmed
