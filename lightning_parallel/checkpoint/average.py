"""A second state of the model in a checkpoint: with a callback that averages weights, the averages or the weights.

``WeightAveraging`` saves the averages as the model's ``state_dict``, and the weights under another key.
``StochasticWeightAveraging`` saves the averages in its own state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_parallel.ranks.local_model import local_part

Place = Sequence[str]  # the keys that lead to a value in nested dictionaries


@dataclass(frozen=True)
class Average:
    """What a callback averages on this rank.

    Attributes:
        module: holds the averages, under the model's names.
        tensors: the averages, by the names of what this rank saves, as plain tensors.
        at: where the callback puts the second state in a checkpoint.
        leads: is it the averages that it saves as the ``state_dict``? Else they are the second state.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]
    at: Place
    leads: bool

    def states_in(self, checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """The weights and the averages in a checkpoint, None if that has no averages."""
        given, second = checkpoint["state_dict"], value_at(checkpoint, self.at)
        return (second, given) if self.leads and second is not None else (given, second)

    def loaded(self, content: Mapping[str, Any], weights: Mapping[str, Any], *, was_saved: bool) -> dict[str, Any]:
        """The content of a checkpoint that has been read, with what the callback loads from it: it is in its place
        already, or, if no averages were saved, they begin with the weights."""
        averages = self.module.state_dict()
        if not was_saved:
            here = {name: local_part(weights[name]) for name in averages if name in weights}
            return {**content, "state_dict": here} if self.leads else dict(content)
        if self.leads:
            return placed({**content, "state_dict": averages}, self.at, weights)
        return placed(content, self.at, averages)


def value_at(content: Mapping[str, Any], at: Place) -> Any | None:
    """The value at a place; None if there is none."""
    value: Any = content
    for key in at:
        if value is None or key not in value:
            return None
        value = value[key]
    return value


def placed(content: Mapping[str, Any], at: Place, value: Any | None) -> dict[str, Any]:
    """A copy with a value at a place; None leaves out what is there. The content stays as it is."""
    first, *rest = at
    if rest:
        return {**content, first: placed(content.get(first) or {}, rest, value)}
    return {**content, first: value} if value is not None else {k: v for k, v in content.items() if k != first}
