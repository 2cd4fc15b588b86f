"""Posts sends: from a thread for messages in host memory, otherwise from the stage's thread."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Send: TypeAlias = Callable[[Tensor], dist.Work]
# Waits until a send has been posted, and returns it. An error of the send is raised here, and not by `Post`: a stage
# that refuses something may close its links, while this one is about to refuse the same.
Posted: TypeAlias = Callable[[], dist.Work]
# Posts a buffer after all earlier ones, and after the event that tells that it is full (None: it is).
Post: TypeAlias = Callable[[Tensor, torch.cuda.Event | None], Posted]
_Handed: TypeAlias = tuple[Tensor, torch.cuda.Event | None, Future[dist.Work]]

_SWITCH_INTERVAL = 5e-5  # seconds; Python's default is 5 ms


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Inside, a sending thread waits at most 50 us for the interpreter's lock. By default it may wait 5 ms while the
    stage's thread computes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(_SWITCH_INTERVAL, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def posts_from_thread(send: Send) -> Post:
    """Posts by ``send`` from a thread of its own. In that call gloo copies the message into a socket: half a
    millisecond for a megabyte, for which the stage should not wait. Nor should it wait for a GPU's copy into the
    message. The thread ends with what is returned, and keeps no process from its exit."""
    handed: SimpleQueue[_Handed | None] = SimpleQueue()
    thread = Thread(target=_post_all, args=(send, handed), name="send", daemon=True)
    thread.start()

    def post(buffer: Tensor, copied: torch.cuda.Event | None) -> Posted:
        posted: Future[dist.Work] = Future()
        handed.put((buffer, copied, posted))
        return posted.result

    weakref.finalize(post, _stop, thread, handed)
    return post


def _post_all(send: Send, handed: SimpleQueue[_Handed | None]) -> None:
    while (item := handed.get()) is not None:
        buffer, copied, posted = item
        try:
            if copied is not None:
                with torch.cuda.device(copied.device):  # a thread's own would be the first GPU
                    copied.synchronize()
            posted.set_result(send(buffer))
        except BaseException as error:  # raised again on the stage's thread
            posted.set_exception(error)
        del item, buffer, posted  # the message's memory is the sender's to release


def _stop(thread: Thread, handed: SimpleQueue[_Handed | None]) -> None:
    """End a sending thread, and its reference to the link: destroying a group joins gloo's threads only if nothing
    refers to the group any more."""
    handed.put(None)
    if thread is not current_thread():  # garbage may be collected in it
        thread.join(timeout=1.0)


def posts_directly(send: Send) -> Post:
    """Posts by ``send`` from the stage's thread, after what was launched on its CUDA stream before. What fills a buffer
    is on the same stream."""

    def post(buffer: Tensor, copied: torch.cuda.Event | None) -> Posted:
        try:
            work = send(buffer)
        except RuntimeError as error:
            failed: Future[dist.Work] = Future()
            failed.set_exception(error)
            return failed.result
        return lambda: work

    return post
