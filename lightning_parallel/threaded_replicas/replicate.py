"""Replicas of a module: a copy of its tree for every device, computing with the one model's weights.

A replica's modules are shallow copies, as torch.nn.parallel.replicate makes them, with every attribute of the user's
objects. Its parameters come out of one node of the autograd graph, which adds up their gradients in the order of the
replicas. On the model's own device they share its memory.

Unlike torch's, these replicas show their parameters: ``self.parameters()`` in a step is not empty, so a penalty on the
weights is one here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_parallel.torch_private import buffers_of, modules_of, parameters_of, shallow_copy


@dataclass(slots=True)
class Copied:
    """A module of the model, its copy in a replica, and the attributes and buffers of the copy as it was made."""

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
        copied: the modules of the model with their copies, the whole model first.
    """

    number: int
    device: torch.device
    module: nn.Module
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


def replicate(
    model: nn.Module,
    devices: Sequence[torch.device],
    stand_in: Callable[..., Any] = lambda module, number: None,
) -> list[Replica]:
    """A replica of ``model``, which is on the first device, for each of ``devices``.

    Args:
        model: the model.
        devices: one for each replica.
        stand_in: called with a ``module`` and the ``number`` of the replica. What it returns takes the module's place
            in the replica; None stands for the usual copy.

    Raises:
        ValueError: a part of the model can't be copied: it is scripted, or has parameters without a shape.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'The model'} is scripted, and can't be replicated: use the unscripted module.")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: run the model on a batch before, for example in setup().")
    parameters = list(model.parameters())
    copies = iter(_Broadcast.apply(devices, *parameters) if parameters else ())
    replicas = []
    for number, device in enumerate(devices):
        places: dict[Any, Any] = {None: None}
        for parameter in parameters:
            places[parameter] = next(copies)
            places[parameter].__dict__.update(parameter.__dict__)
        for buffer in model.buffers():
            # Replica 0's are the model's own, where BatchNorm's statistics have to end up.
            places[buffer] = buffer.to(device, copy=True) if number else buffer
        copied: list[Copied] = []
        whole = _copied(model, places, partial(stand_in, number=number), copied)
        replicas.append(Replica(number, device, whole, copied))
    return replicas


def _copied(module: Any, places: dict[Any, Any], stand_in: Callable[[nn.Module], Any], copied: list[Copied]) -> Any:
    """What is in a module's place in a replica. ``places`` has it for modules that are done, tensors and None."""
    if module not in places:  # else it is registered in two places
        places[module] = stand_in(module)
        if places[module] is None:
            copy = places[module] = shallow_copy(module)
            each = Copied(module, copy, {}, {})
            copied.append(each)
            for name, child in modules_of(module).items():
                modules_of(copy)[name] = _copied(child, places, stand_in, copied)
            parameters_of(copy).update({name: places[own] for name, own in parameters_of(module).items()})
            buffers_of(copy).update({name: places[own] for name, own in buffers_of(module).items()})
            each.attributes.update(copy.__dict__)
            each.buffers.update(buffers_of(copy))
    return places[module]


class _Broadcast(torch.autograd.Function):
    """Tensors on each device, device after device. Where they are already, they share memory."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.count = tensors[0].device, len(tensors)
        copies = [tensor.detach().to(device) for device in devices for tensor in tensors]
        frozen = [copy for copy, tensor in zip(copies, tensors * len(devices), strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *(added(gradients[k :: ctx.count], ctx.device) for k in range(ctx.count))


def added(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """The sum of the replicas' gradients, in their order; None where none has one."""
    present = [gradient.to(device) for gradient in gradients if gradient is not None]
    return reduce(add, present) if present else None
