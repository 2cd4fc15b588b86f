"""Posts sends: from a thread for messages in host memory, otherwise from the stage's thread."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor], dist.Work]

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


class Poster:
    """Posts sends, by ``send(buffer)``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._posted: deque[Future[dist.Work]] = deque()

    def hand(self, buffer: Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Have ``buffer`` posted after all earlier ones, and after the event ``copied``, which tells that it is full
        (None: it is). An error is raised by :meth:`posted`."""
        raise NotImplementedError

    def posted(self) -> dist.Work:
        """The next send, in the order of :meth:`hand`, once it has been posted."""
        return self._posted.popleft().result()


class PostsFromThread(Poster):
    """Posts sends from a thread of its own. In such a call gloo copies the message into a socket: half a millisecond
    for a megabyte, for which the stage should not wait. Nor should it wait for a GPU's copy into the message. The
    thread ends with this object."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        weakref.finalize(self, _end, self._thread)

    def hand(self, buffer: Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._posted.append(self._thread.submit(_send_when_full, self._send, buffer, copied))


def _send_when_full(send: Send, buffer: Tensor, copied: torch.cuda.Event | None) -> dist.Work:
    if copied is not None:
        with torch.cuda.device(copied.device):  # a thread's own would be the first GPU
            copied.synchronize()
    return send(buffer)


def _end(thread: ThreadPoolExecutor) -> None:
    """End a sending thread, and its reference to the link: destroying a group joins gloo's threads only if nothing
    refers to the group any more."""
    with suppress(RuntimeError):  # garbage may be collected in the thread itself, which can't wait for its own end
        thread.shutdown()


class PostsDirectly(Poster):
    """Posts sends from the stage's thread. They begin after what was launched on its CUDA stream before: what fills a
    buffer is on the same stream, so ``copied`` isn't needed. Errors wait for :meth:`posted`, since a stage that refuses
    something may close its links while this one is about to refuse the same."""

    def hand(self, buffer: Tensor, copied: torch.cuda.Event | None = None) -> None:
        future: Future[dist.Work] = Future()
        try:
            future.set_result(self._send(buffer))
        except RuntimeError as error:
            future.set_exception(error)
        self._posted.append(future)

    def next_is_done(self) -> bool:
        """Is the send that :meth:`posted` returns next done? This doesn't wait."""
        if not self._posted:
            return False
        return self._posted[0].exception() is not None or self._posted[0].result().is_completed()
