"""Replicas of a module: copies of its tree for other devices, computing with the one model's weights.

A replica's modules are shallow copies, as torch.nn.parallel.replicate makes them, with every attribute of the user's
objects. The parameters of all come out of one node of the autograd graph, which adds up their gradients in the order of
the replicas. On the model's own device they share its memory. Metrics aren't copied: updates of copies would be lost.

Unlike torch's, these replicas show their parameters: ``self.parameters()`` in a step is not empty, so a penalty on the
weights is one here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from lightning_parallel.private.torch import buffers_of, is_compiled, modules_of, parameters_of, shallow_copy


def replicate(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """The model itself, which is on the first device, and a replica of it for each of the others.

    Raises:
        ValueError: a part of the model can't be copied: it is scripted or compiled, or has parameters without a shape.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'The model'} is scripted, and can't be replicated: use the unscripted module.")
        if is_compiled(module):
            raise ValueError(
                f"{name or 'The model'} is compiled, and can't be replicated in one process: leave torch.compile out, "
                f"or use strategy='ddp'."
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: run the model on a batch before, for example in setup().")
    parameters = list(model.parameters())
    copies = iter(_Broadcast.apply(devices[1:], *parameters) if parameters else ())
    replicas = [model]
    for device in devices[1:]:
        places: dict[Any, Any] = {None: None}
        for parameter in parameters:
            places[parameter] = next(copies)
            places[parameter].__dict__.update(parameter.__dict__)
        for buffer in model.buffers():
            places[buffer] = buffer.to(device, copy=True)
        replicas.append(_copied(model, places))
    return replicas


def _copied(module: Any, places: dict[Any, Any]) -> Any:
    """What is in a module's place in a replica. ``places`` has it for modules that are done, tensors and None."""
    if isinstance(module, Metric | MetricCollection):
        return module
    if module not in places:  # else it is registered in two places
        copy = places[module] = shallow_copy(module)
        modules_of(copy).update({name: _copied(child, places) for name, child in modules_of(module).items()})
        parameters_of(copy).update({name: places[own] for name, own in parameters_of(module).items()})
        buffers_of(copy).update({name: places[own] for name, own in buffers_of(module).items()})
    return places[module]


def set_apart(model: nn.Module, replica: nn.Module) -> Iterator[str]:
    """The names of buffers, and of attributes that are numbers or tensors, of which the model and a replica have made
    different values. They were equal when the replica was made."""
    for (path, own), copy in zip(model.named_modules(), replica.modules(), strict=True):
        others = vars(copy) | buffers_of(copy)
        for name, value in (vars(own) | buffers_of(own)).items():
            if isinstance(value, Tensor | int | float) and not _equal(value, others.get(name)):
                yield f"{path}.{name}" if path else name


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # A tensor of another layout can't be compared, and is hardly ever written to.
        return one.layout is not torch.strided or torch.equal(one.to(other.device), other)
    return type(one) is type(other) and bool(one == other)


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
