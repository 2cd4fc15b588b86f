"""A rank's shard of a tensor, as torch's distributed checkpoint sees it: boxes of the whole, each at its offset::

    q k v fused, [12, 3], rank 1 of 2 holds       offsets (2, 0)  sizes (2, 3)      of q
                                                          (6, 0)        (2, 3)      of k
                                                          (10, 0)       (2, 3)      of v

A shard that is fully sharded too has its rows divided once more, over the replicas; replica 1 of 2 holds::

                                                  offsets (7, 0)  sizes (1, 3)      of k
                                                          (10, 0)       (2, 3)      of v

The checkpoint asks a tensor for its boxes through three methods, ``torch.distributed._checkpointable._Checkpointable``,
which DTensor implements too. A DTensor won't do here: it has one box, and the shard of a fused projection has several
(:mod:`~lightning_parallel.shard`). The protocol is undocumented; ``tests/checkpoint/test_slices.py`` pins it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_parallel.local_model import local_part
from lightning_parallel.shard import Shard, piece
from lightning_parallel.torch_private import wrapper_tensor


class Boxes(Tensor):
    """A tensor with the whole's shape that holds only some boxes of it. It can be saved and loaded, not computed
    with."""

    def boxes(self) -> Iterable[tuple[Sequence[int], Tensor]]:
        """For each box, its offsets in the whole, and a view of its values."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # the checkpoint's planner calls it before it asks for the boxes
            return args[0].detached()
        raise RuntimeError(f"{func}: a rank's boxes of a tensor can be saved and loaded, not computed with.")

    def detached(self) -> Boxes:
        """A new tensor object with the same boxes, as ``Tensor.detach`` returns one."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.size()),
            )
            for box in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=values.size()) for at, values in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for at, values in self.boxes():
            if index.offset == torch.Size(at):
                return values
        raise ValueError(f"{index} is none of the boxes of {self!r}.")


class Slices(Boxes):
    """A tensor with the whole's shape that holds this rank's shard of it.

    Attributes:
        local: the shard, perhaps a DTensor. Reading a checkpoint fills it in place.
        shard: how it was cut.
    """

    local: Tensor
    shard: Shard

    @staticmethod
    def __new__(cls, local: Tensor, shard: Shard) -> Slices:
        self = wrapper_tensor(cls, shard.shape, dtype=local.dtype, device=local.device)
        self.local = local.detach()
        self.shard = shard
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Slices({tuple(self.local.shape)} of {tuple(self.shape)})"

    def detached(self) -> Slices:
        return Slices(self.local, self.shard)

    def boxes(self) -> Iterator[tuple[list[int], Tensor]]:
        """One box for each range of the shard, as far as its rows are on this rank."""
        here, dim = local_part(self.local), self.shard.dim
        first = _first_row(self.local)  # of the shard's rows, the first that is here
        position = 0  # along `dim` of the shard
        for start, stop in self.shard.ranges():
            at, length = [0] * here.dim(), stop - start
            at[0], at[dim] = first, start
            begin, end = position, position + length
            if dim == 0:
                begin, end = max(begin, first) - first, min(end, first + len(here)) - first
                at[0] = start + begin + first - position
            if begin < end and here.numel():
                yield at, here.narrow(dim, begin, end - begin)
            position += length


class HostCopy(Boxes):
    """A tensor with the whole's shape that holds ``copies``, in host memory, of a rank's boxes of it: for each its
    offsets in the whole, and its values. :func:`on_host` makes it."""

    copies: list[tuple[Sequence[int], Tensor]]

    @staticmethod
    def __new__(cls, like: Tensor, copies: list[tuple[Sequence[int], Tensor]]) -> HostCopy:
        self = wrapper_tensor(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))
        self.copies = copies
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostCopy({len(self.copies)} boxes of {tuple(self.shape)})"

    def detached(self) -> HostCopy:
        return HostCopy(self, self.copies)

    def boxes(self) -> list[tuple[Sequence[int], Tensor]]:
        """The copied boxes."""
        return self.copies


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory of what this rank holds of a tensor. It can be saved while the tensor changes."""
    if not isinstance(tensor, Boxes | DTensor):
        return tensor.detach().to("cpu", copy=True)
    protocol: Any = tensor
    at = [box.offsets for box in protocol.__create_chunk_list__()]
    held = [protocol.__get_tensor_shard__(MetadataIndex("", offset)) for offset in at]
    return HostCopy(tensor, [(o, values.detach().to("cpu", copy=True)) for o, values in zip(at, held, strict=True)])


def _first_row(shard: Tensor) -> int:
    """The first row that this rank holds: ``fully_shard`` divides dimension 0."""
    if not isinstance(shard, DTensor):
        return 0
    return piece(shard.shape[0], shard.device_mesh.get_local_rank(), shard.device_mesh.size())[0]
