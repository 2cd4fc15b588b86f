"""messages/posting.py: sends are posted in the order in which they were handed over, errors included."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.posting import PostsDirectly, PostsFromThread, short_switch_interval


class Link:
    """Posts sends, and remembers from which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def send(self, buffer: Tensor) -> dist.Work:
        self.threads.append(threading.current_thread().name)
        if buffer.item() < 0:
            raise RuntimeError("no luck")
        return cast("dist.Work", buffer)


@pytest.mark.parametrize("kind", [PostsFromThread, PostsDirectly])
def test_sends_come_back_in_the_order_of_handing_them_over(kind: Any) -> None:
    link = Link()
    posts = kind(link.send)
    for number in range(5):
        posts.hand(torch.tensor(number))
    assert [int(cast(Tensor, posts.posted())) for _ in range(5)] == list(range(5))
    assert set(link.threads) == {"send" if kind is PostsFromThread else threading.current_thread().name}


def test_an_error_of_a_send_is_raised_where_it_is_asked_for_and_later_ones_go_on() -> None:
    posts = PostsFromThread(Link().send)
    posts.hand(torch.tensor(-1))
    posts.hand(torch.tensor(3))
    with pytest.raises(RuntimeError, match="no luck"):
        posts.posted()
    assert int(cast(Tensor, posts.posted())) == 3


def test_the_thread_ends_with_the_object() -> None:
    def sending() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "send"}

    gc.collect()  # what earlier tests have left
    before = sending()
    posts = PostsFromThread(Link().send)
    assert len(sending() - before) == 1
    del posts
    gc.collect()
    assert sending() <= before


def test_a_sending_thread_gets_the_interpreter_soon_while_a_schedule_runs() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="no luck"), short_switch_interval():
        assert sys.getswitchinterval() <= 5e-5 < before
        raise RuntimeError("no luck")
    assert sys.getswitchinterval() == before
