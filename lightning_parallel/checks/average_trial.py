"""Refuses functions that would average parts of the parameters otherwise than whole ones.

Averages are elementwise, unless the user's own ``avg_fn`` or ``multi_avg_fn`` isn't. So before training it averages
small made-up parameters, once together and whole, and once divided as the ranks have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.seeding import TorchGenerators

_SHAPES = ((6, 4), (6, 4), (4,), (4,))
_UPDATES = 4
_TOLERANCE = 1e-9  # in float64: only rounding may differ


def refuse_functions(
    callback: str, functions: Mapping[str, Any], device: torch.device, strategy: str, *, in_shards: bool
) -> None:
    """Refuse averaging functions that aren't the same on parts.

    Args:
        callback: the name of the callback's class, for the message, as ``strategy``.
        functions: those that are given to torch's ``AveragedModel``.
        in_shards: do ranks hold parts of a parameter, not only whole ones of other parameters?

    Raises:
        ValueError: it names the callback.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1 + _UPDATES, *shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    given = [each.to(device) for each in drawn]  # equal on all ranks
    with TorchGenerators(device).kept():
        whole = _averaged(functions, given)
        cut = _halves if in_shards else _alone
        for values, averages in zip(given, whole, strict=True):
            for part, expected in zip(cut(values), cut(averages[None]), strict=True):
                [alone] = _averaged(functions, [part])
                if not (alone - expected).abs().max() <= _TOLERANCE * expected.abs().max():  # NaN too
                    raise ValueError(
                        f"{callback} under {strategy}: its averaging function gives other values on a part of the "
                        f"parameters, as a rank has it, than on all of them. Average entry by entry, as "
                        f"torch.optim.swa_utils.get_ema_avg_fn(decay) does, or use strategy='ddp'."
                    )


def _alone(values: Tensor) -> list[Tensor]:
    return [values]


def _halves(values: Tensor) -> list[Tensor]:
    """Halves along each of a parameter's dimensions, which are those after the first."""
    return [half for dim in range(1, values.dim()) for half in values.tensor_split(2, dim)]


def _averaged(functions: Mapping[str, Any], given: Sequence[Tensor]) -> list[Tensor]:
    """Averages of parameters over some updates; each is given as its values in all of them."""
    model = nn.ParameterList([nn.Parameter(values[0].clone()) for values in given])
    averages = AveragedModel(model, **deepcopy(dict(functions)))  # one that counts its calls begins anew
    for update in range(_UPDATES + 1):
        with torch.no_grad():
            for parameter, values in zip(model, given, strict=True):
                parameter.copy_(values[update])
        averages.update_parameters(model)
    return [each.detach() for each in averages.module.parameters()]
