"""A rank's shard of a tensor, as a checkpoint sees it: boxes of a larger tensor, each with its place.

torch's distributed checkpoint asks a tensor for its boxes through three methods (``_Checkpointable``, the protocol that
DTensor implements too). A DTensor itself won't do: the shard of a fused projection is several boxes (see
:mod:`~lightning_parallel.tensor.shard`). The protocol is torch's own and undocumented; ``tests/test_slices.py`` pins
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_parallel.tensor.shard import Shard


class Slices(Tensor):
    """Says it is the whole tensor, and holds this rank's shard of it.

    Attributes:
        local: the shard; reading a checkpoint fills it in place.
        shard: its place in the whole.
    """

    local: Tensor
    shard: Shard

    @staticmethod
    def __new__(cls, local: Tensor, shard: Shard) -> Slices:
        self: Slices = Tensor._make_wrapper_subclass(cls, shard.shape, dtype=local.dtype, device=local.device)
        self.local = local.detach()
        self.shard = shard
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Slices({tuple(self.local.shape)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # the checkpoint's planner does, before it asks for the boxes
            return Slices(args[0].local, args[0].shard)
        raise RuntimeError(f"{func}: a rank's slices can be saved and loaded, not computed with.")

    # -- torch.distributed._checkpointable._Checkpointable --------------------------------------------------------

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
