"""Chooses the CUDA stream on which a message is copied or received.

What is launched on one stream runs in order. If messages were on the stream of the layers, a receive would begin after
the last layer launched before it, and the next layer after the receive. So layers run on the stream that is current,
*compute*, and messages on others. Of the microbatches 0, 1 and 2, on a stage in the middle::

    over gloo, through pinned host memory
        incoming     to device 0 | to device 1 | to device 2
        compute                  | layers 0    | layers 1    | layers 2
        outgoing                               | to host 0   | to host 1   | to host 2

    over NCCL
        incoming     receive 0   | receive 1      | receive 2
        compute                  | layers 0, copy | layers 1, copy | layers 2, copy
        NCCL's own                                | send 0         | send 1         | send 2

Over gloo a thread waits until the copy to the host is done, and then posts the send (``posting.py``). What is sent is
copied on compute first: layers that are launched later may write to where it lay.

Averaged gradients need no stream of ours: NCCL's collectives run on a stream of NCCL's own, and compute waits for it
where the averages are read.

torch's allocator gives freed memory away again at once, in the order of the stream that it was allocated on. If another
stream uses a tensor, the allocator has to be told (``record_stream``, as in torchgpipe's ``copy.py``). The memory for a
receive is allocated on *incoming*, since a receive there doesn't wait for compute, which may still use memory that it
has freed.

On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The streams of a rank's messages, beside the stream that layers run on.

    Attributes:
        incoming: a context in which receives and copies to the device, and the memory allocated for them, wait for no
            layer. Call :meth:`arrived` before layers read such memory. It is one object, not to be entered in itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._incoming = torch.cuda.Stream(device) if on_gpu else None
        self._outgoing = torch.cuda.Stream(device) if on_gpu else None
        self.incoming: AbstractContextManager[Any] = torch.cuda.stream(self._incoming) if on_gpu else nullcontext()

    def arrived(self, tensor: Tensor) -> None:
        """Let layers that are launched from now on read a tensor that was allocated inside ``incoming``."""
        if self._incoming is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._incoming)
            tensor.record_stream(compute)

    @contextmanager
    def outgoing(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, copies of these tensors to the host wait for the layers that were launched before, and no layer waits
        for the copies. Tensors on the device stay allocated until the copies are done."""
        if self._outgoing is None:
            yield
            return
        self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outgoing):
            yield
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(self._outgoing)

    def copied(self) -> torch.cuda.Event | None:
        """An event that happens when all copies launched so far inside :meth:`outgoing` are done; None on a CPU. A
        thread that waits for it sleeps."""
        return None if self._outgoing is None else self._outgoing.record_event(torch.cuda.Event(blocking=True))
