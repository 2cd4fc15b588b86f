"""The seconds that an optimizer's step takes, tried on tensors like the parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_parallel.costs.devices import Device, seconds_of
from lightning_parallel.private.torch.tensors import TorchDispatchMode

_SAMPLE = 2**27  # bytes of parameters that are stepped together, so that they aren't all in a cache
_LEAST, _MOST = 0.01, 20  # seconds of one measurement, and runs
_DIVIDED = 25e-6  # seconds that an operation takes more on a DTensor


class Updates:
    """What an optimizer's step takes for each parameter. Where it can't be tried, the bytes that it reads and writes
    tell."""

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer] | None, device: Device, tried_on: torch.device
    ) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}  # of the parameters that were tried
        self._operations: dict[str, float] = {}  # of them
        self._fixed = 0.0
        for optimizer in optimizers or () if device.measured else ():
            try:
                self._try(module, optimizer, tried_on)
            except Exception:  # any: of the user's optimizer
                self._seconds.clear()
                return

    def seconds(self, parts: Mapping[str, float], nbytes: int, *, divided: bool = False) -> float:
        """Of a step.

        Args:
            parts: the parameters that are stepped, by name, and which part of each.
            nbytes: parameters, gradients and state together.
            divided: are they parts of divided tensors, each operation on which takes time of its own?
        """
        if not self._seconds:
            # Parameters, gradients and state are read, and all but the gradients written, most of them several times.
            return 2 * self._device.passes(nbytes)
        more = _DIVIDED * sum(self._operations.get(name, 0.0) for name in parts) if divided else 0.0
        return self._fixed + more + sum(part * self._seconds.get(name, 0.0) for name, part in parts.items())

    def _try(self, module: nn.Module, optimizer: Optimizer, tried_on: torch.device) -> None:
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = {n: p for n, p in module.named_parameters() if id(p) in group_of and p.requires_grad}
        kinds: dict[Any, list[str]] = {}
        for name, parameter in named.items():
            kinds.setdefault((group_of[id(parameter)], tuple(parameter.shape), parameter.dtype), []).append(name)
        nothing = _timed(optimizer, [], tried_on)
        each = {
            kind: max(0.0, _timed(optimizer, [named[names[0]]], tried_on) - nothing) for kind, names in kinds.items()
        }
        sample: list[nn.Parameter] = []
        alone = 0.0
        for kind, names in kinds.items():  # of all kinds, before there are too many bytes
            for name in names:
                if sample and sum(p.nbytes for p in sample) + named[name].nbytes > _SAMPLE:
                    break
                sample.append(named[name])
                alone += each[kind]
        together = _timed(optimizer, sample, tried_on) - nothing
        slower = together / alone if alone else 1.0
        self._fixed += nothing
        self._seconds |= {name: slower * each[kind] for kind, names in kinds.items() for name in names}
        counted = _Counted()
        own = _on_twins(optimizer, sample[:1], tried_on)
        own.step()
        with counted:
            own.step()
        self._operations |= dict.fromkeys(named, counted.number)


class _Counted(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _timed(optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> float:
    """Seconds of a step of a copy of an optimizer on tensors like these parameters."""
    own = _on_twins(optimizer, parameters, device)
    own.step()  # makes the state
    return seconds_of(own.step, device, least=_LEAST, most=_MOST)


def _on_twins(optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> Optimizer:
    """A copy of an optimizer, with tensors like these parameters alone."""
    twins = {}
    for parameter in parameters:
        twin = nn.Parameter(torch.randn(parameter.shape, device=device).to(parameter.dtype))
        twin.grad = torch.randn_like(twin)
        twins[id(parameter)] = twin
    return copied(optimizer, twins)


def copied(optimizer: Optimizer, twins: Mapping[int, nn.Parameter]) -> Optimizer:
    """A copy of an optimizer, with other parameters in the place of its own, by the ids of these. Those without one are
    left out."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty(0)) for g in optimizer.param_groups for p in g["params"]}
    own: Optimizer = copy.deepcopy(optimizer, {**memo, **twins})
    vars(own).pop("step", None)  # of a scheduler, and for the optimizer itself
    there = {id(twin) for twin in twins.values()}
    for group in own.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in there]
    return own
