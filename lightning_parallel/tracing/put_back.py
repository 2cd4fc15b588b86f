"""Restores attributes on stages that leave a step before the code that would restore them.

A step may fill a list as layers run, and empty it at its end::

    self.features.append(h)    run by each stage, as far as its last layer
    ...
    self.features.clear()      run by the last stage

Elsewhere the list would grow, and its tensors would keep their graphs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from lightning_parallel.tracing.snapshot import CHANGEABLE, copied, put_back

_NOTHING = object()


class AttributesKept:
    """What these attributes of a module and its parts hold now, by dotted names."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._kept: list[tuple[dict[str, Any], str, Any, Any]] = []  # with a copy of what a container holds
        for path, _, attribute in (name.rpartition(".") for name in names):
            attributes = vars(module.get_submodule(path))
            value = attributes.get(attribute, _NOTHING)
            held = copied(value) if isinstance(value, CHANGEABLE) else None
            self._kept.append((attributes, attribute, value, held))

    def put_back(self) -> None:
        """Give the attributes the same values again, with the same contents."""
        for attributes, attribute, value, held in self._kept:
            if value is _NOTHING:
                attributes.pop(attribute, None)
            else:
                attributes[attribute] = value
            if held is not None:
                put_back(value, held)
