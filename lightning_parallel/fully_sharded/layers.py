"""A stage's layers, fully sharded over its replicas, through a schedule of many forwards and backwards an update.

Each layer is a unit of torch's ``fully_shard``. Used as it is, it would gather a layer and reduce its gradients for
every microbatch. Instead, all layers are gathered when an update begins, while the stage waits for its first
activation. They stay gathered and add up their gradients. The last backward sends the gradients, and frees all but the
rank's own part::

    begin    forward 0   ...   backward 0   ...   backward m-1
    gather                     add up             add up, reduce-scatter, free

So between steps a rank holds its part of the parameters, and of the optimizer's state at any time.

The last backward may reach fewer layers than others, or others than on another replica: under a branch on values a loss
may leave layers out. Layers that it doesn't reach, and all of them where replicas differ, are averaged after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel.fully_sharded.uses import leaves
from lightning_parallel.gradients.averaging import GradientAverager
from lightning_parallel.private.torch.groups import reduce_scatter_into
from lightning_parallel.ranks.collectives import all_alike, broadcast_tensors
from lightning_parallel.tensor_lists import multiply


class FullyShardedLayers:
    """Layers of a stage, each a unit of ``fully_shard`` over the replicas in ``group``. No layer lies inside another,
    and none shares a parameter with the rest of the model. ``host_group`` are the same ranks, for tensors in host
    memory."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group, self._host_group = group, host_group
        self._factor: Callable[[], float | Tensor] = lambda: 1.0
        self._unsent: set[str] = set()  # layers whose gradients no backward of the update sends
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
        self._factor = factor
        for unit in self._units.values():
            unit.set_custom_reduce_scatter(_Multiplied(factor))  # type: ignore[arg-type]  # by its methods

    def begin_update(self) -> None:
        """Begin an update: gather the layers, without waiting for it. From now on backwards add up their gradients, and
        send nothing."""
        self._unsent = set()
        self._end_with(False, self._units)
        self._gathering = [unit.unshard(async_op=True) for unit in self._units.values()]

    def expect_last_backward(
        self, names: Collection[str], edges: Sequence[GradientEdge], parameters: Mapping[str, nn.Parameter]
    ) -> bool:
        """Make the next backward, which begins at ``edges``, the last of an update through each of these layers. All
        replicas call it.

        Args:
            parameters: all parameters of the stage by name.

        Returns:
            Whether all replicas will then have gradients of the same parameters, some of them from just this backward.
            If not, the order in which they send them would differ: what isn't sent yet is to be sent after it.
        """
        reached = leaves(edges)
        now = [name for name, parameter in parameters.items() if parameter in reached]
        earlier = [name for name, parameter in parameters.items() if parameter.grad is not None]
        alike = all_alike(self._host_group, (now, earlier))
        if alike:
            self._end_with(True, names)
        else:
            self._unsent.update(names)
        return alike

    def end_update(self) -> None:
        """End an update: average the gradients that no backward has sent, and free the layers. All replicas call it."""
        self._wait()
        for name, unit in self._units.items():
            assert isinstance(unit, nn.Module)
            whole = {key: p for key, p in unit.named_parameters() if not isinstance(p, DTensor) and p.dim() > 0}
            gradients = {key: parameter.grad for key, parameter in whole.items()}
            is_left = name in self._unsent or any(gradient is not None for gradient in gradients.values())
            averages = GradientAverager(whole, self._group, factor=self._factor).finish(gradients) if is_left else {}
            for parameter in whole.values():
                parameter.grad = None
            unit.reshard()
            for key, parameter in unit.named_parameters():
                if (average := averages.get(key)) is not None:
                    assert isinstance(parameter, DTensor)
                    everywhere = DTensor.from_local(average, parameter.device_mesh, [Replicate()], run_check=False)
                    parameter.grad = everywhere.redistribute(placements=parameter.placements)

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
        self._wait()
        for unit in self._units.values():
            unit.reshard()

    def _wait(self) -> None:
        """Wait until all layers are gathered. One that wasn't called may not be."""
        for handle in filter(None, self._gathering):
            handle.wait()


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
        multiply([input_tensor], self._factor())
        return reduce_scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
