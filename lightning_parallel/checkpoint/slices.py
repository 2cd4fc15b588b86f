"""A rank's shard of a tensor, as torch's distributed checkpoint sees it: boxes of the whole, each at its offset::

    q k v fused, [12, 3], rank 1 of 2 holds       offsets (2, 0)  sizes (2, 3)      of q
                                                          (6, 0)        (2, 3)      of k
                                                          (10, 0)       (2, 3)      of v

A shard that is fully sharded too has its rows divided once more, over the replicas; replica 1 of 2 holds::

                                                  offsets (7, 0)  sizes (1, 3)      of k
                                                          (10, 0)       (2, 3)      of v

The checkpoint asks a tensor for its boxes through three methods, ``torch.distributed._checkpointable._Checkpointable``,
which DTensor implements too. A DTensor won't do here: it has one box, and the shard of a fused projection has several
(:mod:`~lightning_parallel.ranks.shard`). The protocol is undocumented; ``tests/checkpoint/test_slices.py`` pins it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_parallel.private.torch.tensors import tree_map, wrapper_tensor
from lightning_parallel.ranks.local_model import local_part
from lightning_parallel.ranks.shard import Shard, piece

Box = tuple[Sequence[int], Tensor]  # its offsets in the whole, and a view of its values


class Boxes(Tensor):
    """A tensor with the whole's shape that holds only some ``boxes`` of it. It can be saved and loaded, not computed
    with."""

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, boxes: list[Box]) -> Boxes:
        self = wrapper_tensor(cls, shape, dtype=dtype, device=torch.device("cpu"))  # the boxes may be elsewhere
        self.boxes = boxes
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # the checkpoint's planner calls it before it asks for the boxes
            return Boxes(args[0].shape, args[0].dtype, args[0].boxes)
        raise RuntimeError(f"{func}: a rank's boxes of a tensor can be saved and loaded, not computed with.")

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
        return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=values.size()) for at, values in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for at, values in self.boxes:
            if index.offset == torch.Size(at):
                return values
        raise ValueError(f"{index} is none of the boxes that are here.")


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
        self = Boxes.__new__(cls, shard.shape, local.dtype, _boxes_of_shard(local, shard, local_part(local)))
        assert isinstance(self, Slices)
        self.local, self.shard = local.detach(), shard
        return self


def _boxes_of_shard(local: Tensor, shard: Shard, here: Tensor) -> list[Box]:
    """One box for each range of the shard, as far as its rows are on this rank. ``here`` has their values."""
    dim = shard.dim
    first = 0  # of the shard's rows, the first that is here: `fully_shard` divides dimension 0
    if isinstance(local, DTensor):
        first = piece(local.shape[0], local.device_mesh.get_local_rank(), local.device_mesh.size())[0]
    boxes: list[Box] = []
    position = 0  # along `dim` of the shard
    for start, stop in shard.ranges():
        at, length = [0] * here.dim(), stop - start
        at[0], at[dim] = first, start
        begin, end = position, position + length
        if dim == 0:
            begin, end = max(begin, first) - first, min(end, first + len(here)) - first
            at[0] = start + begin + first - position
        if begin < end and here.numel():
            boxes.append((at, here.narrow(dim, begin, end - begin)))
        position += length
    return boxes


def boxes_of(tensor: Tensor) -> list[Box]:
    """What this rank holds of any tensor."""
    if not isinstance(tensor, Boxes | DTensor):
        return [([0] * tensor.dim(), tensor.detach())]
    protocol: Any = tensor
    at = [box.offsets for box in protocol.__create_chunk_list__()]
    return [(offsets, protocol.__get_tensor_shard__(MetadataIndex("", offsets)).detach()) for offsets in at]


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """``tensor`` with other values, of any dtype and on any device, in the place of those that this rank holds. It can
    be saved, and filled in place."""
    if isinstance(tensor, Slices):
        return Boxes(tensor.shape, values.dtype, _boxes_of_shard(tensor.local, tensor.shard, values.detach()))
    if isinstance(tensor, DTensor):
        return Boxes(tensor.shape, values.dtype, [(at, values.detach()) for at, _ in boxes_of(tensor)])
    return values.detach()


def on_host(values: Any) -> Any:
    """A copy of nested values, with what this rank holds of each tensor in host memory. It can be saved while they
    change.

    A GPU copies all tensors into pinned memory, and the host waits once, for all of them. torch keeps this memory for
    the next save.
    """
    devices: set[torch.device] = set()

    def copy_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return deepcopy(value)
        copies: list[Box] = []
        for at, part in boxes_of(value):
            if part.is_cuda:
                devices.add(part.device)
            # A copy that isn't waited for goes to pinned memory.
            copies.append((at, part.to("cpu", non_blocking=part.is_cuda, copy=True)))
        return Boxes(value.shape, value.dtype, copies) if isinstance(value, Boxes | DTensor) else copies[0][1]

    copy = tree_map(copy_of, values)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copy


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of which this rank holds the same part. It is on the CPU, unless it is a DTensor."""
    if isinstance(tensor, Slices):
        return Slices(empty_like(tensor.local, dtype), tensor.shard)
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype)


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Fill what this rank holds of a tensor from the whole, which every rank has."""
    for at, values in boxes_of(tensor):
        place = tuple(slice(begin, begin + size) for begin, size in zip(at, values.shape, strict=True))
        values.copy_(whole[place])
