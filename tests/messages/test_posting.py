"""messages/posting.py: sends are posted in the order in which they were handed over, errors included."""

from __future__ import annotations

import sys
import threading
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.messages.posting import PostsFromThread, short_switch_interval


class Link:
    """Posts sends, and remembers from which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def send(self, buffer: Tensor) -> dist.Work:
        self.threads.append(threading.current_thread().name)
        if buffer.item() < 0:
            raise RuntimeError("no luck")
        return cast("dist.Work", buffer)


def test_an_error_of_a_send_is_raised_where_it_is_asked_for_and_later_ones_go_on() -> None:
    posts = PostsFromThread(Link().send)
    posts.hand(torch.tensor(-1))
    posts.hand(torch.tensor(3))
    with pytest.raises(RuntimeError, match="no luck"):
        posts.posted()
    assert int(cast(Tensor, posts.posted())) == 3


def test_a_sending_thread_gets_the_interpreter_soon_while_a_schedule_runs() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="no luck"), short_switch_interval():
        assert sys.getswitchinterval() <= 5e-5 < before
        raise RuntimeError("no luck")
    assert sys.getswitchinterval() == before
