"""The keys of the tensors in a checkpoint, which don't depend on the layout that saved it::

    model/<parameter or buffer>              as the whole model's state_dict() calls it
    second/<parameter or buffer>             the same, where a callback averages weights: weights and averages
    optimizer/<index>/<parameter>/<state>    for example optimizer/0/net.0.weight/exp_avg
    rank/<coordinate>/<name>                 what belongs to one place in the layout: states of random generators

A place is a coordinate such as ``pp1.dp0.tp0``. After a change of the layout, the checkpoint may have none for a rank's
place. All ranks of one replica load the same batches, so their generators are equal, and any of theirs will do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

MODEL = "model/"
SECOND = "second/"
_OPTIMIZER = "optimizer/"
_RANK = "rank/"

# -- the model and its optimizers ------------------------------------------------------------------------------------

State = Mapping[str, Mapping[str, Any]]  # by parameter, then by the optimizer's own name


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state: for each parameter that has any, tensors and plain values; and the parameter groups, which
    have options and, under "params", parameter names."""

    state: State = field(default_factory=dict)
    param_groups: Sequence[Mapping[str, Any]] = ()


def below(prefix: str, keys: Collection[str]) -> dict[str, str]:
    """The keys that begin with a prefix, by what follows it: of a state of the model, by the tensors' names."""
    return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}


def divided(states: Sequence[State]) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """Split several optimizers' states, in the order in which ``configure_optimizers`` returned these: their tensors by
    key, and for each optimizer its other values by parameter."""
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, dict[str, Any]]] = [{} for _ in states]
    for index, state in enumerate(states):
        for parameter, values in state.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}{index}/{parameter}/{name}"] = value
                else:
                    others[index].setdefault(parameter, {})[name] = value
    return tensors, others


def joined(tensors: Mapping[str, Tensor], others: Sequence[State]) -> list[dict[str, dict[str, Any]]]:
    """The states that :func:`divided` has split."""
    states = [{parameter: dict(values) for parameter, values in each.items()} for each in others]
    for key, tensor in tensors.items():
        if (parts := parts_of(key)) is not None:
            index, parameter, name = parts
            states[index].setdefault(parameter, {})[name] = tensor
    return states


def parts_of(key: str) -> tuple[int, str, str] | None:
    """Of an optimizer's tensor, the number of the optimizer, the parameter, and the optimizer's own name, such as
    ``exp_avg``; None for other tensors."""
    if not key.startswith(_OPTIMIZER):
        return None
    index, rest = key.removeprefix(_OPTIMIZER).split("/", 1)
    parameter, name = rest.rsplit("/", 1)
    return int(index), parameter, name


def parameter_of(key: str) -> str | None:
    """The name of the parameter or buffer that a tensor belongs to; None for other tensors."""
    if key.startswith((MODEL, SECOND)):
        return key.split("/", 1)[1]
    parts = parts_of(key)
    return None if parts is None else parts[1]


# -- places in the layout ----------------------------------------------------------------------------------------


def key_in(coordinate: str, name: str) -> str:
    """The key of a tensor that belongs to a place."""
    return f"{_RANK}{coordinate}/{name}"


def of_replicas(keys: Collection[str]) -> dict[str, dict[str, str]]:
    """For each replica, by its part of the coordinate: the keys of the lowest place for which there are tensors, by the
    tensors' names."""
    places: dict[str, dict[str, str]] = {}
    for key in keys:
        if key.startswith(_RANK):
            place, name = key.removeprefix(_RANK).split("/", 1)
            places.setdefault(place, {})[name] = key
    return {_replica_of(place): places[place] for place in sorted(places, reverse=True)}


def nearest(coordinate: str, keys: Collection[str]) -> dict[str, str]:
    """The keys of a place, by the tensors' names, or else of another place of the same replica; empty if there is
    none."""
    return below(key_in(coordinate, ""), keys) or of_replicas(keys).get(_replica_of(coordinate), {})


def _replica_of(coordinate: str) -> str:
    """The coordinate's part along the data axis, such as ``dp0``; the whole coordinate if it has none."""
    return next((part for part in coordinate.split(".") if part.startswith("dp")), coordinate)
