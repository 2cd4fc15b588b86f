"""Asks all ranks for numbers between two batches, on the host, for ranks that wait for each other anyway.

gloo's all-reduce takes 2 (n - 1) steps around a ring of n ranks. More than 64 ranks ask along the rows, and then along
the columns, of a rectangle that is as close to a square as their number allows. 1,024 ranks need 124 steps, in place of
2,046. A prime number of ranks has one column only::

    0  1      first the highest of each row,
    2  3      then the highest of these in each column
    4  5
    6  7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_parallel.private.torch.groups import group_of_members
from lightning_parallel.ranks.collectives import highest

_IN_ONE_RING = 64  # ranks; an estimate of where shorter rings save more than a second collective costs


class Meeting:
    """Finds the highest numbers that the ranks have. All ranks make it. A rank that is the only one is alone even
    in a process group that somebody else has made. A rank waits for the others for ``timeout``; None for torch's
    default."""

    def __init__(self, ranks: int, timeout: timedelta | None) -> None:
        self._groups: Sequence[dist.ProcessGroup | None] = []
        if ranks == 1:
            return
        if ranks <= _IN_ONE_RING and dist.get_backend() == "gloo":
            self._groups = [dist.group.WORLD]
        else:
            longest_row = math.isqrt(ranks) if ranks > _IN_ONE_RING else 1  # 1: a single column, so one ring
            lines = row_and_column(dist.get_rank(), ranks, longest_row)
            self._groups = [group_of_members(line, timeout, "gloo", "meeting") for line in lines]

    def highest(self, *mine: int) -> list[int]:
        """The highest that any rank passes, of each number. All ranks call it with as many."""
        found = [*mine]
        for group in self._groups:
            found = highest(group, *found)
        return found


def row_and_column(rank: int, ranks: int, longest_row: int) -> list[list[int]]:
    """The ranks in a rank's row and in its column of the rectangle with the longest rows up to ``longest_row``. Rows
    and columns of one rank are left out."""
    length = next(length for length in range(longest_row, 0, -1) if ranks % length == 0)
    row, column = divmod(rank, length)
    lines = [list(range(row * length, (row + 1) * length)), list(range(column, ranks, length))]
    return [line for line in lines if len(line) > 1]
