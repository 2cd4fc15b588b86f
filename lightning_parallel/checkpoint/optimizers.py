"""An optimizer's state as a checkpoint has it: under the parameters' names, one optimizer apart from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

State = Mapping[str, Mapping[str, Any]]  # by parameter, then by the optimizer's own name


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state.

    Attributes:
        state: of each parameter that has any: tensors, and plain values.
        param_groups: options, and the names of the parameters under "params".
    """

    state: State = field(default_factory=dict)
    param_groups: Sequence[Mapping[str, Any]] = ()


def key_of(index: int, parameter: str, name: str) -> str:
    """The key of a tensor in the checkpoint.

    Args:
        index: of the optimizer, as ``configure_optimizers`` returned them.
        parameter: whose state it is.
        name: by which the optimizer knows it.
    """
    return f"optimizer/{index}/{parameter}/{name}"


def parts_of(key: str) -> tuple[int, str, str] | None:
    """What :func:`key_of` made the key of; None for the key of something else."""
    if not key.startswith("optimizer/"):
        return None
    index, rest = key.removeprefix("optimizer/").split("/", 1)
    parameter, name = rest.rsplit("/", 1)
    return int(index), parameter, name


def divided(states: Sequence[State]) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """The tensors of several optimizers by key, and for each optimizer its other values by parameter."""
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, dict[str, Any]]] = [{} for _ in states]
    for index, state in enumerate(states):
        for parameter, values in state.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[key_of(index, parameter, name)] = value
                else:
                    others[index].setdefault(parameter, {})[name] = value
    return tensors, others
