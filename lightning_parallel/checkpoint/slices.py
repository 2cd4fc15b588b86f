"""A rank's shard of a tensor, as torch's distributed checkpoint sees it: boxes of the whole, each at its offset::

    q k v fused, [12, 3], rank 1 of 2 holds       offsets (2, 0)  sizes (2, 3)      of q
                                                          (6, 0)        (2, 3)      of k
                                                          (10, 0)       (2, 3)      of v

The checkpoint asks a tensor for its boxes through three methods, ``torch.distributed._checkpointable._Checkpointable``,
which DTensor implements too. A DTensor won't do here: it has one box, and the shard of a fused projection has several
(:mod:`~lightning_parallel.shard`). The protocol is undocumented; ``tests/checkpoint/test_slices.py`` pins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_parallel.shard import Shard
from lightning_parallel.torch_private import wrapper_tensor


class Slices(Tensor):
    """Has the whole tensor's shape, and holds this rank's shard of it. It can be saved and loaded, not computed with.

    Attributes:
        local: the shard. Reading a checkpoint fills it in place.
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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # the checkpoint's planner calls it before it asks for the boxes
            return Slices(args[0].local, args[0].shard)
        raise RuntimeError(f"{func}: a rank's slices can be saved and loaded, not computed with.")

    # -- the checkpoint's protocol -------------------------------------------------------------------------------

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
        boxes = []
        for start, stop in self.shard.ranges():
            offsets, sizes = [0] * self.dim(), list(self.shape)
            offsets[self.shard.dim], sizes[self.shard.dim] = start, stop - start
            boxes.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        return boxes

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        position = 0
        for box in self.__create_chunk_list__():
            length = box.sizes[self.shard.dim]
            if box.offsets == index.offset:
                return self.local.narrow(self.shard.dim, position, length)
            position += length
        raise ValueError(f"{index} is none of the boxes of {self!r}.")
