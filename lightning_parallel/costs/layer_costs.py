"""What one call of a layer takes, tried by running a copy of it on stand-ins: seconds, and bytes held for its backward.

Autograd says itself what it saves. Parameters aren't counted, since they are there anyway, and memory that several
saved tensors share is counted once. What goes into a layer and out of it is counted apart: its neighbours may hold the
same memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_parallel.absent.answers import stand_in
from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.comparison.held import Held
from lightning_parallel.costs.devices import Device, seconds_of
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch.tensors import tensors_in, tree_leaves, tree_map
from lightning_parallel.values import PLAIN

_LEAST = 0.1  # seconds of all runs that are timed
_NUMBERS = ("idx", "index", "_id", "number")  # ends of names of attributes that number equal layers


@dataclass(frozen=True)
class Cost:
    """Of one call on some samples.

    Attributes:
        forward, backward: seconds; zero if it wasn't timed.
        first: those of the backward's first half, which the layer before waits for.
        inner: bytes held from its forward to its backward, besides its inputs and outputs.
        inputs: those of each tensor that it is given, as far as they are held.
        outputs: those of its outputs that are held.
        forward_peak, backward_peak: bytes that are there for a moment of its forward, or of its backward, besides what
            is held, what it returns, and the gradient of that.
        around: bytes that the code after it computes.
        kept: those of them that are held for its backward.
        returned: bytes of its outputs.
        sent_forward, sent_backward: seconds in which its tensor ranks exchange sums, besides the others.
    """

    forward: float = 0.0
    backward: float = 0.0
    first: float = 0.0
    inner: float = 0.0
    inputs: tuple[float, ...] = ()
    outputs: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    around: float = 0.0
    kept: float = 0.0
    returned: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0

    @classmethod
    def mixed(cls, costs: Sequence[Cost], weights: Sequence[float]) -> Cost:
        """The weighted sum of costs, as on a line through them. Nothing in it is below zero."""
        return cls(*(_mixed(values, weights) for values in zip(*map(astuple, costs), strict=True)))

    def at_least(self, part: float, other: Cost) -> Cost:
        """The same, but no faster than a part of another one."""
        return replace(
            self,
            forward=max(self.forward, part * other.forward),
            backward=max(self.backward, part * other.backward),
            first=max(self.first, part * other.first),
        )


def _mixed(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_mixed(each, weights) for each in zip(*values, strict=True))
    return max(0.0, sum(value * weight for value, weight in zip(values, weights, strict=True)))


def kind_of(unit: nn.Module, args: Any, kwargs: Any) -> Any:
    """A key that is equal for calls that take the same: layers of one class, shapes and numbers, and inputs of one
    shape, of layers or of the batch. What a layer is called, and its number among equal ones, doesn't count."""
    parts = []
    for part in unit.modules():
        plain = {name: value for name, value in vars(part).items() if isinstance(value, (int, float, str))}
        numbers = tuple(sorted((k, v) for k, v in plain.items() if not k.endswith(_NUMBERS)))
        own = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in part.parameters(recurse=False))
        parts.append((type(part), numbers, own))
    return tuple(parts), tuple(map(_kind, tree_leaves((args, kwargs))))


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, isinstance(value, AbsentTensor)
    return value if isinstance(value, PLAIN) else type(value)


def tried(
    unit: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    group: GroupOnPaper,
    rates: Device,
    *,
    on_paper: bool = False,
) -> Cost:
    """What a call takes on a device.

    Args:
        args, kwargs: of the call; tensors without values get random ones.
        context: the precision's.
        group: the tensor ranks among which the layer is divided.
        rates: of the device that is planned for. Where it is measured, the call is timed.
        on_paper: run it without memory and without arithmetic, in torch's mode of fake tensors, for what autograd
            would save.

    Raises:
        Exception: the layer's own. It may need other values than random ones.
    """
    given: list[Tensor] = []

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = _like(value) if on_paper else stand_in(value).detach().to(device)
        if isinstance(value, AbsentTensor) and made.is_floating_point():
            made.requires_grad_()
        given.append(made)
        return made

    own = _without_memory(unit) if on_paper else copy.deepcopy(unit).to(device)  # its buffers and gradients may change
    args, kwargs = tree_map(real, (args, kwargs))

    def run() -> Any:
        now_args, now_kwargs = with_own_objects((args, kwargs))
        with torch.enable_grad(), context():
            return own(*now_args, **now_kwargs)

    saved: dict[int, int] = {}  # what autograd saves: bytes by the memory in which they lie
    alive: list[Tensor] = []  # else memory could be given to another one

    def note(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        alive.append(tensor.detach())
        return tensor

    with group.noted() as sent, saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    sent_forward = rates.collectives(sent, group.size())
    there = {storage_key(tensor) for tensor in (*own.parameters(), *own.buffers())}
    inputs = {storage_key(tensor) for tensor in given} - there
    outputs = {storage_key(tensor) for tensor in tensors_in(output)} - inputs - there
    held = {key: size for key, size in saved.items() if key not in there}
    gradients = [torch.ones_like(tensor) for tensor in _differentiable(output)]
    del output
    alive.clear()
    with group.noted() as sent:
        forward_peak, backward_peak = _for_a_moment(own, run, given, gradients)
    forward, backward, first = _times(run, given, gradients, device) if rates.measured else (0.0, 0.0, 0.0)
    return Cost(
        forward=forward,
        backward=backward,
        first=first,
        inner=sum(size for key, size in held.items() if key not in inputs | outputs),
        inputs=tuple(held.get(storage_key(tensor), 0) for tensor in given),
        outputs=sum(held.get(key, 0) for key in outputs),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        sent_forward=sent_forward,
        sent_backward=rates.collectives(sent, group.size()) - sent_forward,
    )


def _times(
    run: Callable[[], Any], given: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
) -> tuple[float, float, float]:
    """Seconds of the forward, of the backward and of its first half."""
    if not gradients:
        return seconds_of([run], device, least=_LEAST)[0], 0.0, 0.0
    pending: list[Any] = []  # what a forward has given, until its backward
    arrived = [tensor for tensor in given if tensor.requires_grad]

    def forward() -> None:
        pending.append(run())

    def backward() -> None:
        torch.autograd.backward(_differentiable(pending.pop()), gradients)
        for tensor in given:
            tensor.grad = None

    def first_half() -> None:
        torch.autograd.grad(_differentiable(pending.pop()), arrived, gradients, allow_unused=True)

    works = [forward, backward, *([forward, first_half] if arrived else [])]
    seconds = seconds_of(works, device, least=_LEAST)
    return fmean(seconds[::2]), seconds[1], min(seconds[1], seconds[3]) if arrived else 0.0


def _for_a_moment(
    unit: nn.Module, run: Callable[[], Any], given: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[int, int]:
    """The bytes that a forward and a backward take besides what is there when they end, or begin."""
    for parameter in unit.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    parameters = [*unit.parameters()]
    held = Held([*parameters, *unit.buffers(), *(p.grad for p in parameters if p.grad is not None), *given, *gradients])
    with held:
        output = run()
    forward = held.most - held.now
    held.forget()
    begin, results = held.now, _differentiable(output)
    del output
    if results:
        with held:
            torch.autograd.backward(results, gradients)
    for tensor in given:
        tensor.grad = None
    return forward, held.most - begin


def _without_memory(unit: nn.Module) -> nn.Module:
    """A copy of a layer, in a mode in which its tensors are made without memory."""
    memo: dict[int, Any] = {}
    for tensor in (*unit.parameters(), *unit.buffers()):
        made = _like(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(unit, memo)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def with_own_objects(arguments: Any) -> Any:
    """Arguments with copies of the objects in them, such as a cache, to which a layer writes. Tensors and modules are
    the same."""

    def own(value: Any) -> Any:
        if isinstance(value, (Tensor, nn.Module, *PLAIN)):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:  # any: of the user's class, which doesn't allow it
            return value

    return tree_map(own, arguments)


def storage_key(tensor: Tensor) -> int:
    """A key that is equal for tensors in the same memory."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _differentiable(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]
