"""Refuses optimizers whose parameters aren't the module's, and those whose states no checkpoint would have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer


def refuse_strange_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters that an optimizer has and the module hasn't: no rank would train them, or each another copy.

    Raises:
        ValueError: there are some.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that isn't one of "
                    f"the module's. Register what holds it on the LightningModule, as an nn.Module."
                )


def refuse_own_format(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose class saves more than torch's do: checkpoints have states by parameters' names.

    Raises:
        ValueError: it names what would be lost.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if more:
            raise ValueError(
                f"{type(optimizer).__name__}.state_dict() adds {more} to torch's format. A checkpoint for every layout "
                f"has what optimizer.state and the parameter groups have, and would lose it. Keep it in "
                f"optimizer.state[parameter] or as an option of the groups, or use strategy='ddp'."
            )
