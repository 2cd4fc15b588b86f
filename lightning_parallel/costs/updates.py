"""What an optimizer keeps for each parameter, and the seconds of its step: tried by a copy of it, on tensors like the
parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.callbacks.start_table import state_bytes
from lightning_parallel.costs.devices import Device, seconds_of
from lightning_parallel.private.torch.tensors import tree_leaves

_SAMPLE = 2**27  # bytes of parameters that are stepped together, so that they aren't all in a cache
_LEAST = 0.01  # seconds of all runs that are timed
_DIVIDED = 0.3e-3  # seconds that a parameter's step takes more on a DTensor: twelve operations of AdamW, 25 us each


class Updates:
    """What optimizers keep and take for each parameter that is trained.

    Args:
        optimizers: None if they can't be made ahead. Then two tensors like each parameter are assumed, as where one
            can't be tried.

    Attributes:
        problem: why something is assumed; None if nothing is.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer] | None, device: Device, tried_on: torch.device
    ) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.problem = "configure_optimizers can't be called ahead" if optimizers is None else None
        self._measured = device.measured
        # By parameter, bytes of tensors of its own shape, and of others.
        self._kept = {name: (2 * p.nbytes, 0) for name, p in trained.items() if optimizers is None}
        seconds: dict[str, float] = {}
        for optimizer in optimizers or ():
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = {name: p for name, p in trained.items() if id(p) in ids}
            try:
                self._kept |= _kept(optimizer, own)
            except Exception as error:  # any: of the user's optimizer
                known = state_bytes(optimizer)
                copies = 2.0 if known is None else known / max(1, sum(p.nbytes for p in own.values()))
                self._kept |= {name: (round(copies * p.nbytes), 0) for name, p in own.items()}
                if known is None:
                    self.problem = f"{type(optimizer).__name__} can't be tried without memory ({error})"
            with suppress(Exception):  # any: of the user's optimizer
                seconds |= _seconds(optimizer, own, tried_on) if device.measured else {}
        # Of others, parameters, gradients and state are read, and all but the gradients written, most several times.
        by_bytes = {name: 2 * device.passes(2 * trained[name].nbytes + sum(kept)) for name, kept in self._kept.items()}
        self._seconds = by_bytes | seconds

    def nbytes(self, name: str, part: float) -> int:
        """What is kept for a parameter, of which a rank has a part."""
        like, others = self._kept.get(name, (0, 0))
        return round(part * like) + others

    def seconds(self, parts: Mapping[str, float], *, divided: bool) -> float:
        """Of a step.

        Args:
            parts: the parameters that a rank holds, by name, and which part of each.
            divided: are they parts of divided tensors, each operation on which takes time of its own?
        """
        own = {name: part for name, part in parts.items() if name in self._seconds}
        more = _DIVIDED * len(own) if divided and self._measured else 0.0
        return more + sum(part * self._seconds[name] for name, part in own.items())


def _kept(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """By parameter the bytes of tensors of its own shape, and of others."""
    own, twins = _on_twins(optimizer, parameters.values(), torch.device("meta"))
    own.step()
    found = {}
    for (name, parameter), twin in zip(parameters.items(), twins, strict=True):
        tensors = [x for x in tree_leaves(dict(own.state.get(twin, {}))) if isinstance(x, Tensor)]
        like = sum(x.nbytes for x in tensors if x.shape == parameter.shape)
        found[name] = like, sum(x.nbytes for x in tensors) - like
    return found


def _seconds(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], device: torch.device) -> dict[str, float]:
    """By parameter its part of a step. By their bytes, since most optimizers step all together."""
    nbytes = sum(p.nbytes for p in parameters.values())
    sample = [*parameters.values()][:: 1 + nbytes // _SAMPLE]
    own, _ = _on_twins(optimizer, sample, device)
    own.step()  # makes the state
    [taken] = seconds_of([own.step], device, least=_LEAST)
    of_byte = taken / max(1, sum(p.nbytes for p in sample))
    return {name: of_byte * p.nbytes for name, p in parameters.items()}


def _on_twins(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
) -> tuple[Optimizer, list[nn.Parameter]]:
    """A copy of an optimizer, and the tensors like these parameters that it has alone."""
    twins = {}
    for parameter in parameters:
        twin = nn.Parameter(torch.randn(parameter.shape, device=device).to(parameter.dtype))
        twin.grad = torch.randn_like(twin)
        twins[id(parameter)] = twin
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty(0)) for g in optimizer.param_groups for p in g["params"]}
    own: Optimizer = copy.deepcopy(optimizer, {**memo, **twins})
    vars(own).pop("step", None)  # of a scheduler, and for the optimizer itself
    there = {id(twin) for twin in twins.values()}
    for group in own.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in there]
    return own, [*twins.values()]
