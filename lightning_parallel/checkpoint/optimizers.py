"""An optimizer's state in a checkpoint: by parameter name, each optimizer by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

State = Mapping[str, Mapping[str, Any]]  # by parameter, then by the optimizer's own name


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state: for each parameter that has any, tensors and plain values; and the parameter groups, which
    have options and, under "params", parameter names."""

    state: State = field(default_factory=dict)
    param_groups: Sequence[Mapping[str, Any]] = ()


def key_of(index: int, parameter: str, name: str) -> str:
    """The key, in the checkpoint, of a tensor of a parameter's optimizer state. ``index`` counts the optimizers as
    ``configure_optimizers`` returned them; ``name`` is the optimizer's own, such as ``exp_avg``."""
    return f"optimizer/{index}/{parameter}/{name}"


def parts_of(key: str) -> tuple[int, str, str] | None:
    """The arguments for which :func:`key_of` gives this key; None if it gives it for none."""
    if not key.startswith("optimizer/"):
        return None
    index, rest = key.removeprefix("optimizer/").split("/", 1)
    parameter, name = rest.rsplit("/", 1)
    return int(index), parameter, name


def divided(states: Sequence[State]) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """Split several optimizers' states: their tensors by key, and for each optimizer its other values by parameter."""
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
