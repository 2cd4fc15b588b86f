"""A process group whose other ranks don't exist: for a part of a model that is tried in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Sent = tuple[Kind, int]  # a collective, and the bytes of the whole


class GroupOnPaper(dist.ProcessGroup):
    """The first rank of a group of so many. Its collectives leave results as they are, and are noted.

    torch calls these methods, under these names, for a group that is written in Python.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # a group in Python has no store
        self._sent: list[Sent] | None = None

    @contextmanager
    def noted(self) -> Iterator[list[Sent]]:
        """Gives a list to which the collectives inside are added."""
        sent: list[Sent] = []
        self._sent = sent
        try:
            yield sent
        finally:
            self._sent = None

    def _note(self, sent: Sent) -> None:
        if self._sent is not None:
            self._sent.append(sent)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # of two ways to call it
        self._note(("all_reduce", tensors[0].nbytes))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self._note(("all_gather", output.nbytes))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self._note(("reduce_scatter", input.nbytes))

    # Before torch 2.13 they had these names.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]
