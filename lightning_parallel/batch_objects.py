"""Objects in batches that hold tensors but aren't containers, such as torch_geometric's batches of graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_graphs(node: Any) -> bool:
    """Is it a batch of graphs as torch_geometric's, which its class can split into graphs and join again?"""
    return hasattr(node, "to_data_list") and hasattr(node, "from_data_list") and hasattr(node, "apply")


def is_opaque(node: Any) -> bool:
    """Does an object that is no container hold tensors? Lightning moves what has a method ``to``."""
    return hasattr(node, "to") or any(isinstance(value, Tensor) for value in _attributes(node).values())


def split_graphs(batch: Any, lengths: Sequence[int]) -> list[Any]:
    """A batch of graphs as batches of these numbers of graphs."""
    # The base class joins graphs of any class. torch_geometric makes the batch's own class for that of its graphs.
    kind: Any = next(each for each in reversed(type(batch).__mro__) if "from_data_list" in vars(each))
    graphs = iter(batch.to_data_list())
    return [kind.from_data_list([next(graphs) for _ in range(length)]) for length in lengths]


def tensors_of_graphs(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch of graphs, in order."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    copy.copy(batch).apply(note)
    return filter(torch.is_tensor, found)


def copied(node: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """A shallow copy of ``node``, with ``tensor(t)`` in the place of each of its tensors ``t``."""
    own = copy.copy(node)
    if is_graphs(node):
        return own.apply(tensor)
    for name, value in _attributes(node).items():
        if isinstance(value, Tensor):
            setattr(own, name, tensor(value))
    return own


def _attributes(node: Any) -> Mapping[str, Any]:
    return getattr(node, "__dict__", {})
