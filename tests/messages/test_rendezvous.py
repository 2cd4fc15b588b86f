"""Hosts that wait for their whole device, where a send ends only when its receive has been launched, as over NCCL.

A host waits so where a kernel is loaded at its first launch, where the allocator is short of memory, or in a callback.
Each host here is a thread that runs its stage's list with the announced senders and receivers of the library. Their
links are queues between threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from queue import Queue
from threading import Condition, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.messages.announced import AnnouncedReceiver, Announcements, AnnouncingSender
from lightning_parallel.messages.streams import Streams
from lightning_parallel.schedules.actions import Action, BackwardInput, Message, Schedule, Step, needed, placement, sent
from lightning_parallel.schedules.checks import validate
from lightning_parallel.schedules.generators import one_at_a_time
from lightning_parallel.schedules.named import SCHEDULES
from tests.thorough import thorough

CPU = torch.device("cpu")
PATIENCE = 10.0  # seconds; a run takes some milliseconds
Way = tuple[str, int]  # a message's kind, and its cut
Place = tuple[int, int]  # a stage, and the index of one of its actions


class Sending:
    done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        """A stream waits, and no host."""


class Direct:
    """Between two devices: a send ends when its receive is launched."""

    device, through_host, streams = CPU, False, Streams(CPU)

    def __init__(self, moved: Condition) -> None:
        self._moved, self._waiting = moved, deque[tuple[Tensor, Sending]]()
        self.sendings: list[Sending] = []

    def isend(self, buffer: Tensor) -> Any:
        self.sendings.append(Sending())
        self._waiting.append((buffer.clone(), self.sendings[-1]))
        return self.sendings[-1]

    def irecv(self, buffer: Tensor) -> Any:
        content, sending = self._waiting.popleft()
        buffer.copy_(content)
        with self._moved:
            sending.done = True
            self._moved.notify_all()
        return sending

    def wait(self, work: Any) -> None:
        pass


class Hosts:
    """Between two hosts: a message is kept until it is asked for."""

    device, through_host, streams = CPU, False, Streams(CPU)

    def __init__(self) -> None:
        self._sent: Queue[Tensor] = Queue()

    def isend(self, buffer: Tensor) -> Any:
        self._sent.put(buffer.clone())
        return Sending()

    def irecv(self, buffer: Tensor) -> Any:
        return partial(self._copied, buffer)

    def _copied(self, buffer: Tensor) -> None:
        buffer.copy_(self._sent.get(timeout=PATIENCE))

    def wait(self, work: Any) -> None:
        if callable(work):
            work()


def finished(schedule: Schedule, waits: Callable[[Place, Action], bool], patience: float = PATIENCE) -> bool:
    """Do all hosts come to the end of their lists, if these wait for their devices? Each has some seconds."""
    moved = Condition()
    places, links = placement(schedule), defaultdict[Way, tuple[Direct, Hosts]](lambda: (Direct(moved), Hosts()))
    ways = [(kind, cut) for kind in ("activation", "gradient") for cut in range(len(places) - 1)]
    crossing = [way for way in ways if places[way[1]] != places[way[1] + 1]]
    for way in crossing:
        links[way]  # before threads ask for it
    ended: list[int] = []

    def host(stage: int) -> None:
        announcements = Announcements()
        mine = {chunk for chunk, place in enumerate(places) if place == stage}
        receivers, senders = dict[Way, AnnouncedReceiver](), dict[Way, AnnouncingSender]()
        for kind, cut in crossing:
            ends = (cut, cut + 1) if kind == "activation" else (cut + 1, cut)
            direct, hosts = links[kind, cut]
            if ends[0] in mine:
                senders[kind, cut] = AnnouncingSender(direct, hosts)  # type: ignore[arg-type]
            if ends[1] in mine:
                receivers[kind, cut] = AnnouncedReceiver(direct, hosts, announcements)  # type: ignore[arg-type]
        for action in schedule[stage]:
            if (message := crosses(needed, action)) is not None:
                receivers[message[:2]].expect(0)
        for index, action in enumerate(schedule[stage]):
            if waits((stage, index), action):
                launched = [sending for way in senders for sending in links[way][0].sendings]
                with moved:
                    if not moved.wait_for(lambda: all(each.done for each in launched), patience):  # noqa: B023
                        return
            if (message := crosses(needed, action)) is not None:
                taken = receivers[message[:2]].take()
                assert taken is not None and taken[0][0].tolist() == [message.microbatch]
            if (message := crosses(sent, action)) is not None:
                senders[message[:2]].send([torch.tensor([message.microbatch])], 0)
        ended.append(stage)

    def crosses(which: Callable[[Action, int], Message | None], action: Action) -> Message | None:
        message = which(action, len(places))
        return message if message is not None and places[message.cut] != places[message.cut + 1] else None

    threads = [Thread(target=host, args=(stage,), daemon=True) for stage in range(len(schedule))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    return len(ended) == len(schedule)


def stuck(schedule: Schedule) -> list[Place]:
    """The places at which one host may not wait for its device."""
    where = [(stage, i) for stage, actions in enumerate(schedule) for i in range(len(actions))]
    return [place for place in where if not finished(schedule, lambda here, action: here == place)]  # noqa: B023


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    [("interleaved", 2, 4), ("zbv", 2, 4), *thorough(("interleaved", 4, 8), ("zbv", 4, 8))],
)
def test_a_host_may_wait_for_its_device_anywhere(name: str, stages: int, microbatches: int) -> None:
    """While it does, the others launch the receives of what it has announced, whatever they wait for."""
    assert stuck(SCHEDULES[name](stages, microbatches)) == []


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
def test_all_hosts_may_wait_everywhere_while_one_microbatch_is_under_way(name: str) -> None:
    """So it is in a run's first batch on GPUs, where each kernel is loaded."""
    schedule = [one_at_a_time(actions) for actions in SCHEDULES[name](3, 4)]
    assert finished(schedule, lambda here, action: True)


def test_a_host_that_waits_for_what_no_other_has_launched_is_stuck() -> None:
    """Else the tests above would see nothing."""
    assert not finished(SCHEDULES["zbv"](3, 4), lambda here, action: isinstance(action, BackwardInput), patience=0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_microbatch_at_a_time_is_the_same_work_in_the_order_of_microbatches(name: str) -> None:
    schedule = SCHEDULES[name](2, 3)
    made = [one_at_a_time(actions) for actions in schedule]
    validate(made)
    for actions, reordered in zip(schedule, made, strict=True):
        assert {*actions} == {*reordered} and isinstance(reordered[-1], Step)
        numbers = [action.microbatch for action in reordered if not isinstance(action, Step)]
        assert numbers == sorted(numbers)
