"""Posts sends: from a thread for messages in host memory, otherwise from the stage's thread."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread, current_thread

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor], dist.Work]
_Handed = tuple[Tensor, torch.cuda.Event | None]  # a message's buffer, and the event that says it is full

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


class PostsFromThread:
    """Posts sends from a thread of its own, by ``send(buffer)``. In that call gloo copies the message into a socket:
    half a millisecond for a megabyte, for which the stage should not wait. Nor should it wait for a GPU's copy into the
    message. The thread ends with this object."""

    def __init__(self, send: Send) -> None:
        self._handed: SimpleQueue[_Handed | None] = SimpleQueue()
        self._posted: SimpleQueue[dist.Work | BaseException] = SimpleQueue()
        thread = Thread(target=_post_all, args=(send, self._handed, self._posted), name="send", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._handed)

    def hand(self, buffer: Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Have ``buffer`` posted after all earlier ones, and after the event ``copied``, which tells that it is full
        (None: it is)."""
        self._handed.put((buffer, copied))

    def posted(self) -> dist.Work:
        """The next send, in the order of :meth:`hand`, once it has been posted."""
        work = self._posted.get()
        if isinstance(work, BaseException):
            raise work
        return work


def _post_all(send: Send, handed: SimpleQueue[_Handed | None], posted: SimpleQueue[dist.Work | BaseException]) -> None:
    while (item := handed.get()) is not None:
        buffer, copied = item
        try:
            if copied is not None:
                with torch.cuda.device(copied.device):  # a thread's own would be the first GPU
                    copied.synchronize()
            posted.put(send(buffer))
        except BaseException as error:  # raised again on the stage's thread
            posted.put(error)
        del item, buffer  # its memory is the sender's to release


def _end(thread: Thread, handed: SimpleQueue[_Handed | None]) -> None:
    """End a sending thread, and its reference to the link: destroying a group joins gloo's threads only if nothing
    refers to the group any more."""
    handed.put(None)
    if thread is not current_thread():  # garbage may be collected in it
        thread.join(timeout=1.0)


class PostsDirectly:
    """Posts sends from the stage's thread, by ``send(buffer)``. They begin after what was launched on its CUDA stream
    before."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._posted: deque[dist.Work | BaseException] = deque()

    def hand(self, buffer: Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Post ``buffer`` now. What fills it is on the same stream, so ``copied`` isn't needed. An error is raised by
        :meth:`posted`: a stage that refuses something may close its links, while this one is about to refuse the
        same."""
        try:
            self._posted.append(self._send(buffer))
        except RuntimeError as error:
            self._posted.append(error)

    def posted(self) -> dist.Work:
        """The next send, in the order of :meth:`hand`."""
        work = self._posted.popleft()
        if isinstance(work, BaseException):
            raise work
        return work

    def next_is_done(self) -> bool:
        """Is the send that :meth:`posted` returns next done? This doesn't wait."""
        if not self._posted:
            return False
        work = self._posted[0]
        return isinstance(work, BaseException) or work.is_completed()
