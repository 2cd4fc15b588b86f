"""A second state of the model in a checkpoint: ``WeightAveraging`` saves the averages as the ``state_dict``, and the
weights under another key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_parallel.ranks.local_model import local_part

Place = Sequence[str]  # the keys that lead to a value in nested dictionaries
WEIGHTS = "current_model_state"


@dataclass(frozen=True)
class Average:
    """What a callback averages on this rank.

    Attributes:
        module: holds the averages, under the model's names.
        tensors: the averages, by the names of what this rank saves, as plain tensors.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]

    def states_in(self, checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """The weights and the averages in a checkpoint, None if that has no averages."""
        given, weights = checkpoint["state_dict"], checkpoint.get(WEIGHTS)
        return (given, None) if weights is None else (weights, given)

    def loaded(self, weights: Mapping[str, Any], *, was_saved: bool) -> dict[str, Any]:
        """What the callback loads from a checkpoint that has been read: it is in its place already, or, if no averages
        were saved, they begin with the weights."""
        averages = self.module.state_dict()
        if was_saved:
            return {"state_dict": averages, WEIGHTS: weights}
        return {"state_dict": {name: local_part(weights[name]) for name in averages if name in weights}}


def placed(content: Mapping[str, Any], at: Place, value: Any) -> dict[str, Any]:
    """A copy with a value at a place, which earlier versions also had inside another value. The content stays as it
    is."""
    first, *rest = at
    return {**content, first: placed(content.get(first) or {}, rest, value) if rest else value}
