"""A stage's layers, fully sharded over its replicas, through a schedule of many forwards and backwards an update.

Each layer is a unit of torch's ``fully_shard``. Used as it is, it would gather a layer and reduce its gradients for
every microbatch. Instead, all layers are gathered when an update begins, while the stage waits for its first
activation. They stay gathered and add up their gradients. The last backward sends the gradients, and frees all but the
rank's own part::

    begin    forward 0   ...   backward 0   ...   backward m-1
    gather                     add up             add up, reduce-scatter, free

So between steps a rank holds its part of the parameters, and of the optimizer's state at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard

from lightning_parallel.gradients.swapping import multiplied
from lightning_parallel.ranks.collectives import broadcast_tensors


class FullyShardedLayers:
    """Layers of a stage, each a unit of ``fully_shard`` over the replicas in ``group``. No layer lies inside another,
    and none shares a parameter with the rest of the model."""

    def __init__(self, layers: Mapping[str, nn.Module], group: dist.ProcessGroup, device: torch.device) -> None:
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
        first = dist.get_global_rank(group, 0)
        self._units: dict[str, FSDPModule] = {}
        self._gathering: list[UnshardHandle | None] = []
        for name, layer in layers.items():
            layer.to(device)
            broadcast_tensors(layer.parameters(), first, group)  # a user's script need not seed its weights
            scalars = {parameter for parameter in layer.parameters() if parameter.dim() == 0}  # can't be divided
            self._units[name] = fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)

    def multiply_by(self, factor: Callable[[], float | Tensor]) -> None:
        """Multiply this replica's complete gradients before they are averaged. ``factor`` is called after the last
        backward through a layer."""
        for unit in self._units.values():
            unit.set_custom_reduce_scatter(_Multiplied(factor))  # type: ignore[arg-type]  # by its methods

    def hold_back(self) -> None:
        """Begin an update: gather the layers, without waiting for it. From now on backwards add up their gradients, and
        send nothing."""
        self._end_with(False, self._units)
        self._gathering = [unit.unshard(async_op=True) for unit in self._units.values()]

    def release(self, names: Collection[str]) -> None:
        """Make the next backward through each of these layers its last of an update."""
        self._end_with(True, names)

    def _end_with(self, last: bool, names: Collection[str]) -> None:
        for unit in (unit for name, unit in self._units.items() if name in names):
            unit.set_is_last_backward(last)
            unit.set_reshard_after_backward(last)
            unit.set_requires_gradient_sync(last)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the parameters of all layers are gathered."""
        for unit in self._units.values():
            unit.unshard()
        try:
            yield
        finally:
            self.free()

    def free(self) -> None:
        """Free the gathered parameters of layers through which no backward has freed them."""
        for handle in filter(None, self._gathering):
            handle.wait()  # for a layer that wasn't called
        for unit in self._units.values():
            unit.reshard()


class _Multiplied:
    """A reduce-scatter of gradients that are multiplied first, as ``set_custom_reduce_scatter`` takes it. torch's
    division comes after it, by one number for all replicas."""

    def __init__(self, factor: Callable[[], float | Tensor]) -> None:
        self._factor = factor

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        multiplied(input_tensor, self._factor())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
