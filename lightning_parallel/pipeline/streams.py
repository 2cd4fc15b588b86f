"""On which CUDA stream a message is copied or received.

What is launched on one stream runs in order. If messages were on the stream of the layers, a receive would begin after
the last layer launched before it, and the next layer after the receive. So layers run on the stream that is current,
*compute*, and messages on others::

                 over gloo, through pinned host memory            over NCCL
    compute      layer 0 | layer 1         | layer 2              layer 0, copy | layer 1, copy | layer 2
    outgoing             | copy 0 to host  | copy 1 to host       (sends: NCCL's own stream, after what compute has
    incoming     copy 1 to device | copy 2 to device               launched before)
                                                                  receive 1 | receive 2

A thread waits for a copy to the host, and then sends it (``posting.py``). Averaging gradients needs no stream of ours:
NCCL's collectives run on its own, and compute waits for it where the averages are read.

torch's allocator gives freed memory away again at once, in the order of the stream that it was made on. If another
stream uses a tensor, the allocator has to be told (``record_stream``, as in torchgpipe's ``copy.py``). The memory for a
receive is made on *incoming*: freed memory of compute may still be in use there, and a receive doesn't wait for it.

On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The streams of a rank's messages, beside the one that layers run on.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._incoming = torch.cuda.Stream(device) if on_gpu else None
        self._outgoing = torch.cuda.Stream(device) if on_gpu else None

    def incoming(self) -> AbstractContextManager[Any]:
        """Inside, receives and copies to the device don't wait for layers that were launched before, and the memory for
        them is made. Before layers read it, it has to be said that it :meth:`arrived`."""
        return nullcontext() if self._incoming is None else torch.cuda.stream(self._incoming)

    def arrived(self, tensor: Tensor) -> None:
        """Layers that are launched from here on may read a tensor whose memory was made in :meth:`incoming`."""
        if self._incoming is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._incoming)
            tensor.record_stream(compute)

    @contextmanager
    def outgoing(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, copies to the host wait for the layers that made the tensors, and no layer waits for the copies."""
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
        """Happens when all copies are done that were launched in :meth:`outgoing`."""
        return None if self._outgoing is None else self._outgoing.record_event()
