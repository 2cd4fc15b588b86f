"""What a checkpoint has of each place in the layout that saved it: the states of random generators.

A place is a coordinate such as ``pp1.dp0.tp0``. Under another layout a rank's own may not be there. All ranks of one
replica load the same batches, so their generators are equal, and those of any of them will do.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from lightning_parallel.checkpoint.reading import Found, empty

_PREFIX = "rank/"


def key_in(coordinate: str, name: str) -> str:
    """The key of a tensor that belongs to a place."""
    return f"{_PREFIX}{coordinate}/{name}"


def coordinates(found: Found) -> list[str]:
    """Of which places a checkpoint has tensors; those of the lowest coordinates first."""
    return sorted({key.split("/")[1] for key in found if key.startswith(_PREFIX)})


def empty_rank_state(found: Found, coordinate: str) -> dict[str, Tensor]:
    """Tensors to read what belongs to a place into, by name."""
    prefix = key_in(coordinate, "")
    return {key.removeprefix(prefix): empty(found, key) for key in found if key.startswith(prefix)}


def nearest(coordinate: str, saved: Collection[str]) -> str | None:
    """The place itself, or the first one of the same replica; None if there is neither."""
    if coordinate in saved:
        return coordinate
    return next((other for other in saved if replica_of(other) == replica_of(coordinate)), None)


def replica_of(coordinate: str) -> str:
    """Its part along the data axis, such as ``dp0``; the coordinate itself if it has none."""
    return next((part for part in coordinate.split(".") if part.startswith("dp")), coordinate)
