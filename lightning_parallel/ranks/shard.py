"""How a tensor dimension is divided over the tensor axis: the one record that layers, checkpoints and clipping read.

A size n over t ranks is cut as ``torch.chunk`` cuts it: into pieces of ceil(n / t), the last one smaller if need be.
Fused projections, several matrices in one parameter, are divided part by part::

    q, k, v of 4 rows each, fused, over 2 ranks:   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
        rank 0 holds                               q0 q1         k0 k1         v0 v1
        rank 1 holds                                     q2 q3         k2 k3         v2 v3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def piece(size: int, index: int, count: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` of the ``count`` pieces into which ``size`` is cut."""
    length = -(-size // count)
    return min(index * length, size), min((index + 1) * length, size)


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    Attributes:
        shape: the shape of the whole tensor.
        dim: the tensor dimension that is divided.
        parts: the sizes of the fused parts along ``dim``, which add up to the whole; one if nothing is fused.
        index: this rank's coordinate on the tensor axis.
        count: the number of ranks on the tensor axis.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]
    index: int
    count: int

    @classmethod
    def of(
        cls, shape: torch.Size | tuple[int, ...], dim: int, group: dist.ProcessGroup, parts: tuple[int, ...] = ()
    ) -> Shard:
        """The shard of this rank of ``group``.

        Raises:
            ValueError: the parts don't add up to the whole, or a rank would hold nothing of a part.
        """
        dim %= len(shape)
        parts = parts or (shape[dim],)
        if sum(parts) != shape[dim]:
            raise ValueError(f"Parts of sizes {parts} add up to {sum(parts)}, but dimension {dim} has {shape[dim]}.")
        count = group.size()
        for size in parts:
            start, stop = piece(size, count - 1, count)
            if start == stop:
                raise ValueError(
                    f"A dimension of {size} can't be divided over {count} tensor ranks: pieces of "
                    f"{-(-size // count)} leave none for the last. Use fewer ranks, or leave this layer whole."
                )
        return cls(tuple(shape), dim, parts, group.rank(), count)

    def ranges(self) -> list[tuple[int, int]]:
        """Start and stop, along ``dim`` of the whole tensor, of each part's piece on this rank."""
        ranges, offset = [], 0
        for size in self.parts:
            start, stop = piece(size, self.index, self.count)
            ranges.append((offset + start, offset + stop))
            offset += size
        return ranges

    @property
    def size(self) -> int:
        """The size of this rank's shard along ``dim``."""
        return sum(stop - start for start, stop in self.ranges())

    def take(self, whole: Tensor) -> Tensor:
        """This rank's shard of ``whole``, in memory of its own."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges()]
        return torch.cat(pieces, self.dim)  # a copy even of a single piece
