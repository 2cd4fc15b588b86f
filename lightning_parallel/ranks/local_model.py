"""The part of the model that one rank holds, under the whole model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.ranks.shard import Shard


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be fully sharded: the same memory, without autograd."""
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.detach()


def whole(tensor: DTensor) -> Tensor:
    """The whole of a tensor, without autograd. All its ranks call it, and get it on the device on which they meet."""
    there = tensor.detach().to(tensor.device_mesh.device_type)  # offloaded parts are on the CPU
    assert isinstance(there, DTensor)
    return there.full_tensor()


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none, as absent tensors and the pending result of a collective."""
    local = local_part(tensor)
    has_memory = type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided and local.numel() > 0
    return local.untyped_storage().data_ptr() if has_memory else 0


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong in a checkpoint, by name, whatever a ``state_dict()`` of the module's own leaves out."""
    persistent = nn.Module.state_dict(module, keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


@dataclass(frozen=True)
class LocalModel:
    """What one rank holds of the model. Checkpoints, clipping and synchronisation read it.

    Attributes:
        parameters: the parameters here, by original name. Tied parameters appear once, under their first name.
        buffers: returns the buffers here that belong in a checkpoint, by name. Modules replace theirs as they run.
        shards: the parameters of which this rank holds a shard, and how each was cut.
        aliases: for every parameter name of the whole model, tied names included, the name it is held and saved under.
    """

    parameters: dict[str, nn.Parameter]
    buffers: Callable[[], dict[str, Tensor]]
    shards: Mapping[str, Shard]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module, shards: Mapping[str, Shard] | None = None) -> LocalModel:
        """The record of a rank that holds all of ``module``, where the parameters in ``shards`` are shards."""
        parameters = dict(module.named_parameters())  # under their first names
        first = {id(parameter): name for name, parameter in parameters.items()}
        aliases = {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
        return cls(parameters, partial(saved_buffers, module), shards or {}, aliases)

    def tied_names(self, module: nn.Module) -> dict[str, str]:
        """The further names of tied tensors of the whole model, with the name that each is saved under. ``module`` is
        the whole model."""
        first: dict[int, str] = {}
        buffers = {name: first.setdefault(id(b), name) for name, b in module.named_buffers(remove_duplicate=False)}
        return {name: held for name, held in {**self.aliases, **buffers}.items() if name != held}

    @cached_property
    def replicated(self) -> dict[str, nn.Parameter]:
        """The parameters that every replica holds as a whole: those that aren't fully sharded."""
        return {name: p for name, p in self.parameters.items() if not isinstance(p, DTensor)}

    @cached_property
    def is_fully_sharded(self) -> bool:
        """Are any parameters DTensors, fully sharded over the replicas?"""
        return len(self.replicated) < len(self.parameters)

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each parameter, by the parameter's ``id()``."""
        return {id(parameter): name for name, parameter in self.parameters.items()}
