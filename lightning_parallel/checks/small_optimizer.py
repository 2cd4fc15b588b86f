"""Copies of an optimizer that step small, made-up parameters.

The values, the gradients and the sizes are made up. The number of dimensions, the groups and all options but the
learning rate are the user's. The rate is 1: a scheduler may begin with 0, and a small rate changes Prodigy's estimates
too late to be seen.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.checks.no_collectives import no_collectives
from lightning_parallel.optimizers.closures import only_once
from lightning_parallel.private.torch.modules import hooks_of_all_optimizers_left_out
from lightning_parallel.ranks.local_model import LocalModel, local_part

# Of the gradients of each step. Lookahead acts every fifth or sixth, SOAP every tenth. Some take a norm only where it
# is small. Small ones come first, since momentum and second moments remember large ones.
_SCALES = (1e-3,) * 6 + (1.0,) * 6
_LARGEST = 32  # size of a dimension: some treat matrices as such from 16 on
_LARGEST_OF_MANY = 8  # of more than two dimensions


@dataclass(frozen=True)
class Small:
    """A made-up parameter.

    Attributes:
        group: the index of its parameter group.
        name: the name of a parameter of the user's that it stands for.
        like: the parameter of that name.
        dim: the dimension along which tensor ranks divide it; None: not divided.
        value: its value before the first step.
        slope, pull: they give the gradient ``slope * value + pull``, which changes from step to step, and is scaled.
    """

    group: int
    name: str
    like: Tensor
    dim: int | None
    value: Tensor
    slope: Tensor
    pull: Tensor


Piece = Callable[[Tensor], Tensor]  # makes of something of a parameter's shape what one copy of the optimizer sees
Pieces = Sequence[tuple[Small, Piece]]


class Stepped(NamedTuple):
    """What the steps of a copy have come to: the values of its parameters, whole where they were DTensors, and the
    options of its groups."""

    values: list[Tensor]
    groups: list[dict[str, Any]]


# -- made-up parameters ------------------------------------------------------------------------------------------


def made_up(optimizer: Optimizer, local: LocalModel) -> Iterator[Small]:
    """Two made-up parameters for each kind in each group, so that none is alone."""
    generator = torch.Generator().manual_seed(0)
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, tuple[str, Tensor]] = {}
        for parameter in group["params"]:
            if parameter.numel():  # frozen ones may be trained later
                name = local.names.get(id(parameter), "a parameter outside of the module")
                shard = local.shards.get(name)
                kind = (parameter.ndim, shard and shard.dim, _uneven(parameter), _notes(optimizer, parameter))
                if kind not in kinds or parameter.numel() > kinds[kind][1].numel():
                    kinds[kind] = (name, parameter)
        for (_, dim, *_), (name, parameter) in kinds.items():
            device = local_part(parameter).device
            for _ in range(2):
                yield Small(index, name, parameter, dim, *_drawn(_shape(parameter, dim), device, generator))


def _uneven(parameter: Tensor) -> int:
    """The number of rows by which the size is too large for equal parts."""
    return parameter.shape[0] % parameter.device_mesh.size() if isinstance(parameter, DTensor) else 0


def _notes(optimizer: Optimizer, parameter: Tensor) -> frozenset[tuple[tuple[str, str], str]]:
    """What the user has noted on a parameter, or the optimizer in its state, that may divide its group, such as
    ``use_muon``. Of a state no counts are taken: after an earlier fit only its owner has them."""
    notes = {("note", key): repr(value) for key, value in vars(parameter).items() if not isinstance(value, Tensor)}
    state = optimizer.state.get(parameter, {}).items()
    notes.update({("state", key): repr(value) for key, value in state if isinstance(value, bool | str)})
    return frozenset(notes.items())


def _shape(parameter: Tensor, dim: int | None) -> list[int]:
    largest = _LARGEST if parameter.ndim <= 2 else _LARGEST_OF_MANY
    shape = [min(size, largest) for size in parameter.shape]
    if dim is not None:
        shape[dim] = max(2, shape[dim])
    if isinstance(parameter, DTensor) and parameter.shape[0] > largest:
        ranks = parameter.device_mesh.size()
        shape[0] = max(1, largest // ranks) * ranks + _uneven(parameter)
    return shape


def _drawn(shape: list[int], device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A value, a slope and a pull. They grow along each dimension, so that no part is like another."""
    drawn = torch.randn(3, *shape, generator=generator, dtype=torch.float64, device=generator.device)
    value, slope, pull = drawn.to(device)  # equal on all ranks
    growing = torch.ones_like(value)
    for dim, size in enumerate(shape):
        growing *= torch.linspace(1, 3, size, device=device).view(-1, *[1] * (len(shape) - dim - 1))
    return value * growing, 0.5 + 0.2 * slope.tanh(), pull * growing


# -- copies of the optimizer -------------------------------------------------------------------------------------


def stepped(optimizer: Optimizer, pieces: Pieces, steps: int = 0) -> Stepped:
    """Let a copy of the optimizer make steps on pieces of parameters.

    Args:
        steps: how many an update makes, each with the gradients of a part of the parameters, which are there before it;
            0 for one step that calls a closure for them.
    """
    given = [[piece(x) for x in (small.value, small.slope, small.pull)] for small, piece in pieces]
    parameters = [nn.Parameter(value) for value, _, _ in given]
    for (small, _), parameter in zip(pieces, parameters, strict=True):
        vars(parameter).update(vars(small.like))  # what the user has noted on it
    twin = _twin(optimizer, [(small, each) for (small, _), each in zip(pieces, parameters, strict=True)])
    step = type(twin).step  # a scheduler has replaced the method of the optimizer itself
    calls = 0

    @torch.no_grad()
    def closure() -> Any:  # as Lightning's, a tensor
        nonlocal calls
        calls += 1  # some call it twice in a step, after they have moved the parameters
        for parameter, (_, slope, pull) in zip(parameters, given, strict=True):
            parameter.grad = (slope * parameter + pull * (1 + calls % 3)) * scale
        return torch.ones(())

    with no_collectives(), hooks_of_all_optimizers_left_out():
        for scale in _SCALES:  # noqa: B007  the closure reads it
            if not steps:
                step(twin, closure=closure)
                continue
            result = closure()
            gradients = [parameter.grad for parameter in parameters]
            for index in range(steps):
                for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                    parameter.grad = gradient if number % steps == index else None
                step(twin, closure=only_once(result))
    values = [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in parameters]
    return Stepped(values, twin.param_groups)


def _twin(optimizer: Optimizer, parameters: Sequence[tuple[Small, nn.Parameter]]) -> Optimizer:
    """A copy of the optimizer with other parameters, and without hooks.

    Its class may take other arguments than its groups have, and it may hold another optimizer with the same groups. So
    it isn't made anew: what it holds is copied, and each of the user's parameters in it is replaced by a small one.
    """
    cls = type(optimizer)
    twin = cls.__new__(cls)
    Optimizer.__setstate__(twin, {"defaults": dict(optimizer.defaults)})  # what torch keeps itself, hooks too
    state: dict[Any, Any] = defaultdict(dict)
    for small, parameter in parameters:
        values = optimizer.state.get(small.like, {})  # some make it before the first step
        shapes = {value.shape for value in values.values() if isinstance(value, Tensor) and value.numel() > 1}
        if values and shapes <= {small.like.shape}:  # others are of an owner, from an earlier fit
            state[parameter] = {key: _like(value, small.like, parameter) for key, value in values.items()}
    nobody = nn.Parameter(torch.zeros(()))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): state}
    memo.update((id(p), nobody) for group in optimizer.param_groups for p in group["params"])
    own = {name: value for name, value in vars(optimizer).items() if name not in vars(twin) and name != "step"}
    vars(twin).update(copy.deepcopy(own, memo))
    for index, group in enumerate(twin.param_groups):
        group["params"] = [parameter for small, parameter in parameters if small.group == index]
        if isinstance(rate := group.get("lr"), int | float | Tensor):
            group["lr"] = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0
    if callable(train := getattr(twin, "train", None)):  # schedule-free ones
        train()
    return twin


def _like(value: Any, parameter: Tensor, small: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value)
    here = local_part(value).flatten()
    # A constant was set before the first step, on all ranks. After steps of an earlier fit each rank has entries of its
    # own, and the trial's are to be the same on all.
    is_constant = here.numel() > 1 and bool((here == here[0]).all())
    return torch.full_like(small, float(here[0]) if is_constant else 0.0, requires_grad=False)
