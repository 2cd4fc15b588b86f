"""Reads a loader's first batch before training, so that training still gets it.

A loader of one's own, or a DataLoader over a stream, may go on where it was left each time it is iterated. A batch that
is read ahead would be missing, and all later ones would be others. So the iterator that has been begun is the one that
training goes on with::

    before training    iter(loader)   batch 0              generators put back
    training                          batch 0, batch 1, ...    generators as they were after batch 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel.batch import cloned
from lightning_parallel.seeding import random_state, restore_random_state


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states afterwards of the generators that have drawn between two random states."""
    return {name: now for name, now in after.items() if name not in before or not torch.equal(before[name], now)}


class ReadAhead:
    """Stands for a loader while its first batch is read, which is given as a copy: hooks may write to it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] = iter(())
        self._first: list[Any] = []
        self._before: dict[str, Tensor] = {}
        self._drawn: dict[str, Tensor] = {}  # the states after the batch of the generators that it has drawn from

    def __iter__(self) -> Iterator[Any]:
        before = random_state()
        self._iterator = iter(self._loader)
        self._before = before if _moved(before, random_state()) else {}
        return self

    def __next__(self) -> Any:
        self._before = self._before or random_state()
        self._first.append(next(self._iterator))
        self._drawn = _moved(self._before, random_state())
        return cloned(self._first[0])

    def hand_on(self) -> None:
        """Have the loader give the batch again when it is next read, and go on from there: by a method of its own, in a
        subclass of its class."""
        kind = type(self._loader)
        if self._first:
            with suppress(TypeError):  # Python's own kinds, such as lists, refuse it, and begin anew by themselves
                self._loader.__class__ = type(kind.__name__, (kind,), {"__iter__": lambda _: self._go_on(kind)})

    def _go_on(self, kind: type[Any]) -> Iterator[Any]:
        """An iterator of the loader. Only the first that is read gives the batch."""
        first, self._first = self._first, []
        if first:
            self._loader.__class__ = kind
        if first and not self._drawn.keys() & _moved(self._before, random_state()).keys():
            restore_random_state(self._drawn)
            yield first.pop()  # not kept for the whole epoch
            with suppress(StopIteration):
                while True:  # not `yield from`, which would rewind a loader that is its own iterator
                    yield next(self._iterator)
            return
        if first:
            first.clear()
            rank_zero_warn(
                f"{kind.__name__} draws random numbers. Others have been drawn since its first batch was read for the "
                f"dry run of the step, so it is iterated anew. If it goes on where it was left, its first batch is "
                f"missing: let nothing draw between set-up and training, or give the loader a generator of its own."
            )
        yield from self._loader
