"""Replicas of a module: a copy of its tree for every device, computing with the one model's weights.

A replica's modules are shallow copies, as torch.nn.parallel.replicate makes them, with every attribute of the user's
objects. Its parameters are leaves of its own graph. So the backwards of several replicas can run at once, and none
writes to the model's ``.grad``. :func:`reduce` adds up their gradients in the order of the replicas. On the model's own
device the leaves share its memory; other GPUs get a copy by torch.nn.parallel's coalesced broadcast.

Unlike torch's, these replicas show their parameters: ``self.parameters()`` in a step is not empty, so a penalty on the
weights is one here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm
from torch.nn.parameter import is_lazy

from lightning_parallel.torch_private import buffers_of, modules_of, parameters_of, shallow_copy

StandIn = Callable[[nn.Module, int], Any]


@dataclass(slots=True)
class Copied:
    """A module of the model and its copy in a replica.

    Attributes:
        original: the module.
        copy: its copy.
        attributes: of the copy, as made.
        buffers: of the copy, as made.
    """

    original: nn.Module
    copy: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]

    def set(self, name: str, value: Any) -> None:
        """Give the copy an attribute that :meth:`Replica.keep` leaves out."""
        self.copy.__dict__[name] = self.attributes[name] = value


@dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        number: from 0.
        device: where it is.
        module: the copy of the whole model.
        leaves: its trainable parameters, in the order of :func:`trainable`.
        copied: the modules of the model with their copies, the whole model first.
    """

    number: int
    device: torch.device
    module: nn.Module
    leaves: list[Tensor]
    copied: list[Copied]

    def keep(self) -> None:
        """Write to the model what this replica changed in its copy: buffers (statistics of BatchNorm) and attributes.

        What the other replicas changed in theirs is lost. Buffers that are changed in place are the model's own in
        replica 0.
        """
        for each in self.copied:
            for name, value in each.copy.__dict__.items():
                if name not in each.attributes or each.attributes[name] is not value:
                    each.original.__dict__[name] = value
            for name, buffer in buffers_of(each.copy).items():
                if name not in each.buffers or each.buffers[name] is not buffer:
                    buffers_of(each.original)[name] = buffer


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that gradients are for, each once, in order; none while gradients are off."""
    return [p for p in model.parameters() if p.requires_grad] if torch.is_grad_enabled() else []


def replicate(model: nn.Module, devices: Sequence[torch.device], stand_in: StandIn | None = None) -> list[Replica]:
    """A replica of ``model``, which is on the first device, for each of ``devices``.

    Args:
        model: the model.
        devices: one for each replica.
        stand_in: called with a module and the replica's number. What it returns takes the module's place in the
            replica; None stands for the usual copy.

    Raises:
        ValueError: a part of the model can't be copied: it is scripted, or has parameters without a shape.
    """
    _check(model)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    on_devices = broadcast(parameters, devices)
    buffers_on_devices = broadcast(buffers, devices)
    replicas = []
    for i, device in enumerate(devices):
        copies: dict[Tensor, Any] = {
            p: _parameter(p, tensor) for p, tensor in zip(parameters, on_devices[i], strict=True)
        }
        for buffer, tensor in zip(buffers, buffers_on_devices[i], strict=True):
            # Replica 0's are the model's own, where BatchNorm's statistics have to end up.
            copies[buffer] = buffer if i == 0 else tensor.clone() if device == buffer.device else tensor
        copied: list[Copied] = []
        module = _copy_tree(model, i, copies, stand_in, {}, copied)
        leaves = [copies[parameter] for parameter in trainable(model)]
        replicas.append(Replica(i, device, module, leaves, copied))
    return replicas


def _parameter(original: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, original.requires_grad and torch.is_grad_enabled())
    parameter.__dict__.update(original.__dict__)
    return parameter


def _copy_tree(
    module: nn.Module,
    replica: int,
    tensors: dict[Tensor, Any],
    stand_in: StandIn | None,
    done: dict[nn.Module, Any],
    copied: list[Copied],
) -> Any:
    if module in done:  # registered in two places
        return done[module]
    standing_in = None if stand_in is None else stand_in(module, replica)
    if standing_in is not None:
        done[module] = standing_in
        return standing_in
    copy = done[module] = shallow_copy(module)
    each = Copied(module, copy, {}, {})
    copied.append(each)
    for name, child in modules_of(module).items():
        placed = None if child is None else _copy_tree(child, replica, tensors, stand_in, done, copied)
        modules_of(copy)[name] = placed
    for name, parameter in parameters_of(module).items():
        parameters_of(copy)[name] = None if parameter is None else tensors[parameter]
    for name, buffer in buffers_of(module).items():
        buffers_of(copy)[name] = None if buffer is None else tensors[buffer]
    each.attributes.update(copy.__dict__)
    each.buffers.update(buffers_of(copy))
    return copy


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'The model'} is scripted, and can't be replicated: use the unscripted module.")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: run the model on a batch before, for example in setup().")


# -- weights out, gradients back ---------------------------------------------------------------------------------


def broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """The tensors on each device, outside of any graph. Where they are already, they share memory."""
    detached = [tensor.detach() for tensor in tensors]
    if detached and _distinct_gpus(devices):
        return [list(copies) for copies in comm.broadcast_coalesced(detached, devices)]
    return [[tensor.to(device) for tensor in detached] for device in devices]


def reduce(
    gradients: Sequence[Sequence[Tensor | None]], devices: Sequence[torch.device], output: torch.device
) -> list[Tensor | None]:
    """The sum over replicas, in their order; None where none has a gradient.

    Args:
        gradients: of each replica, for the same parameters.
        devices: of each replica.
        output: the device on which the sums are wanted.
    """
    columns = list(zip(*gradients, strict=True))
    coalesced = {i for i, column in enumerate(columns) if _everywhere(column)}
    if not coalesced or not _distinct_gpus(devices):
        return [_sum(column, output) for column in columns]
    together = [[column[i] for i in sorted(coalesced)] for column in gradients]
    added = iter(comm.reduce_add_coalesced(together, output.index))
    return [next(added) if i in coalesced else _sum(column, output) for i, column in enumerate(columns)]


def _sum(column: Sequence[Tensor | None], output: torch.device) -> Tensor | None:
    total: Tensor | None = None
    for gradient in column:
        if gradient is not None:
            moved = gradient.to(output)
            total = moved if total is None else total + moved
    return total


def _everywhere(column: Sequence[Tensor | None]) -> bool:
    return all(gradient is not None for gradient in column)


def _distinct_gpus(devices: Sequence[torch.device]) -> bool:
    return 1 < len(devices) == len(set(devices)) and all(device.type == "cuda" for device in devices)
