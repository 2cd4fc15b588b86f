"""What the fully sharded strategy does besides running the units: a module's parameters divided over the replicas.

The sharding is torch's own (``torch.distributed.fsdp.fully_shard``), for LightningModules as they are. The blocks of
the model are its units (:mod:`lightning_parallel.fully_sharded.units`). What lies around them belongs to the root::

    Root                       fully_shard: gathered for the whole step
      LightningModule          the user's class, untouched; its steps run as the root's forward
        embedding, head, ...
        block 0, 1, ...        fully_shard each: gathered while it runs, forward and backward

A parameter without dimensions can't be divided: every rank keeps it whole.

A step with manual optimization updates parameters while it runs, so nothing may stay gathered for all of it. There is
no root then: each network that the module holds (a GAN's generator and discriminator) is a unit, and parameters outside
of all networks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_parallel.checks.manual import BackwardGuard
from lightning_parallel.cuts.layers import Layers, named_layers
from lightning_parallel.fully_sharded.units import check_dtypes, materialize, refuse_second_derivatives, untied
from lightning_parallel.fully_sharded.uses import Uses
from lightning_parallel.ranks.collectives import broadcast_tensors
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.writes import Writes
from lightning_parallel.set_up.part_of_model import attributes_kept, configure_part

_LOST = (
    "A step changes '{}' in place. It sees the parameter gathered, and this copy is freed: the change would be lost. "
    "Compute with another tensor, as in F.linear(x, self.weight * self.mask), or change it in on_train_batch_start, "
    "where each rank has its part. Or use strategy='ddp'."
)


class Root(nn.Module):
    """Holds the parameters that lie in no unit, and runs the user's steps as its forward."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class UnitShards:
    """This rank's shards of a module's units. The first three arguments are settings of the strategy; ``guard`` tells
    whether a backward runs.

    Attributes:
        module: the one that has been divided.
        root: what the module's steps run in; None with manual optimization.
        uses: what steps have used.
        writes: changes of gathered parameters in training (True), and in evaluation.
        outside: the parts whose divided parameters only the root gathers, and the module.
    """

    uses: Uses
    writes: dict[bool, Writes]
    outside: set[nn.Module]
    _whole: set[nn.Parameter]  # on every rank

    def __init__(self, patterns: Sequence[str] | None, reshard: bool, cpu_offload: bool, guard: BackwardGuard) -> None:
        self._patterns, self._reshard, self._cpu_offload, self._guard = patterns, reshard, cpu_offload, guard
        self.module: pl.LightningModule | None = None
        self.root: Root | None = None
        self._units: list[FSDPModule] = []  # all of them, the root too

    def divide(self, run: Run) -> None:
        """Divide the parameters of a run's module, once for a module. All replicas call it."""
        if self.module is not run.module:
            with attributes_kept(run.module):
                self._divide(run, run.module)
            self.module = run.module

    def _divide(self, run: Run, module: pl.LightningModule) -> None:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                "The module's parameters are fully sharded already, by another Trainer, before an error, or by you. "
                "Build a new module for this Trainer, and load its weights from a checkpoint."
            )
        manual = not module.automatic_optimization
        units = find_units(module, self._patterns, manual=manual)
        policy = CPUOffloadPolicy() if self._cpu_offload and run.device.type != "cpu" else OffloadPolicy()
        replicas = run.groups.along("data")
        mesh = DeviceMesh.from_group(replicas, run.device.type, mesh_dim_names=("data",))
        scalars: set[nn.Parameter] = set()
        root = None if manual else Root(module)
        self._units = []
        for name, part in (*units.items(), ("", root or module)):  # the rest last: what the others have left
            materialize(name, part if name else module, run.device)
            parameters = [p for p in part.parameters() if not isinstance(p, DTensor) and p not in scalars]
            for parameter in parameters:
                parameter.data = parameter.data.to(run.device).contiguous()
            # A user's script need not seed its weights.
            broadcast_tensors(parameters, run.layout.rank_at(data=0), replicas)
            if part is module:
                break  # there is no root
            scalars.update(parameter for parameter in parameters if parameter.dim() == 0)
            # None: the root's parameters stay, since its backward begins as soon as its forward has ended.
            reshard = self._reshard if part is not root else None
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, ignored_params=scalars)
            assert isinstance(part, FSDPModule)
            self._units.append(part)
            part.register_forward_pre_hook(partial(self._gathered, module))
            part.register_forward_hook(partial(self._about_to_free, module), prepend=True)  # before torch's own
            if name:
                refuse_second_derivatives(name, part)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(run.device)
        configure_part(module)
        checked = set(scalars)
        for name, part in (*units.items(), *([("", root)] if root else ())):
            own = [parameter for parameter in part.parameters() if parameter not in checked]
            check_dtypes(name, own)
            checked.update(own)
        divided = {
            name: part
            for name, part in module.named_modules()
            if any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False))
        }
        host_group = run.groups.on_host(run.layout.peers("data"))
        self._whole = {parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)}
        self.root, self.uses = root, Uses(units, divided, host_group)
        self.outside = {module, *divided.values()} - {part for unit in units.values() for part in unit.modules()}
        self.writes = {training: Writes(_LOST, host_group) for training in (True, False)}

    def _gathered(self, module: nn.Module, unit: nn.Module, args: Any) -> None:
        """Begin to watch a unit's parameters for writes. They are whole now, and its forward is about to run."""
        writes = self.writes[torch.is_grad_enabled()]
        if writes.is_on and not self._guard.is_open:  # in a backward a unit runs again, perhaps not to its end
            own, named = set(unit.parameters()) - self._whole, module.named_parameters()
            writes.begin({name: p for name, p in named if p in own and not isinstance(p, DTensor)})

    def _about_to_free(self, module: nn.Module, unit: nn.Module, args: Any, output: Any) -> None:
        self.writes[torch.is_grad_enabled()].end(module.named_parameters())

    def free(self) -> None:
        """Free what is gathered."""
        for unit in self._units:
            unit.reshard()


def find_units(
    module: nn.Module, patterns: Sequence[str] | None = None, *, manual: bool = False
) -> dict[str, nn.Module]:
    """The units of a model, by name, those inside another one first.

    Args:
        patterns: the setting ``units``.
        manual: optimization is manual, so there is no root around the units, and by default networks are units too.

    Raises:
        ValueError: a pattern matches nothing, or a unit is inside another.
    """
    if patterns is not None:
        return untied(module, named_layers(module, patterns, "units") or [])
    if not manual:
        return untied(module, Layers(module, None).in_lists())
    names = []
    for name, network in _networks(module).items():
        names += [*(f"{name}.{layer}" for layer in Layers(network, None).in_lists()), name]
    return untied(module, names)


def _networks(module: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters that a module calls, by name: its children, and in place of a container its children.
    The module's own ``forward`` doesn't count."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:  # nn.ModuleList, nn.ModuleDict
            found |= {f"{name}.{inner}": network for inner, network in _networks(child).items()}
        else:
            found[name] = child
    return found
