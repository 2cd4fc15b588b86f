"""messages/posting.py: sends are posted in the order in which they were handed over, errors included."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.posting import posts_directly, posts_from_thread, short_switch_interval


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
