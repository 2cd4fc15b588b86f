"""Counts the bytes of tensors that a rank holds at once, while it trains.

An allocator on a GPU counts them itself, a CPU's doesn't. So operators are observed: what they are given and what they
make is memory, from then on until it is freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch.tensors import TorchDispatchMode, tensors_in


class Held(TorchDispatchMode):
    """Counts memory inside ``with held:``. Memory that several tensors share counts once.

    What other threads allocate counts from when this thread uses it: a message that waits isn't seen.

    Attributes:
        most: bytes at once.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.most = self._now = 0  # of the latter, memory that has been given back by resizing isn't taken off yet
        self._there: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not isinstance(own, AbsentTensor) and not own.is_meta:
                self._note(own)
        self._look()

    @property
    def now(self) -> int:
        """The bytes that are there."""
        for key, (memory, size) in self._there.copy().items():  # memory may be freed meanwhile
            there = memory()
            if there is not None and there.nbytes() != size:
                self._now += there.nbytes() - size
                self._there[key] = memory, there.nbytes()
        return self._now

    def forget(self) -> None:
        """Begin to count anew, with what is there."""
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AbsentTensor) for kind in types):
            return NotImplemented  # these come first, and what they call is seen
        output = func(*args, **(kwargs or {}))
        self.add(tensors_in((args, kwargs, output)))
        return output

    def _note(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key, nbytes = id(memory), memory.nbytes()  # the object lives as long as the memory
        known = self._there.get(key)
        if known is not None and known[1] == nbytes:
            return
        self._now += nbytes - (0 if known is None else known[1])
        self._there[key] = ref(memory, lambda _: self._freed(key)) if known is None else known[0], nbytes

    def _freed(self, key: int) -> None:
        self._now -= self._there.pop(key, (None, 0))[1]

    def _look(self) -> None:
        if self._now > self.most:
            self.most = max(self.most, self.now)
