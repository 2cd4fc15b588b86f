"""What a checkpoint holds for each place in the layout that saved it: the states of random generators.

A place is a coordinate such as ``pp1.dp0.tp0``. After a change of the layout, the checkpoint may have none for a rank's
place. All ranks of one replica load the same batches, so their generators are equal, and any of theirs will do.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_parallel.checkpoint.reading import Found, empty

_PREFIX = "rank/"


def key_in(coordinate: str, name: str) -> str:
    """The key of a tensor that belongs to a place."""
    return f"{_PREFIX}{coordinate}/{name}"


def coordinates(found: Found) -> list[str]:
    """The places for which a checkpoint has tensors, the lowest coordinates first."""
    return sorted({key.split("/")[1] for key in found if key.startswith(_PREFIX)})


def empty_rank_state(found: Found, coordinate: str) -> dict[str, Tensor]:
    """Tensors, by name, to read what belongs to a place into."""
    prefix = key_in(coordinate, "")
    return {key.removeprefix(prefix): empty(found, key) for key in found if key.startswith(prefix)}


def nearest(coordinate: str, saved: Sequence[str]) -> str | None:
    """The place itself, or else the first one of the same replica; None if there is neither."""
    return coordinate if coordinate in saved else of_replicas(saved).get(_replica_of(coordinate))


def of_replicas(saved: Sequence[str]) -> dict[str, str]:
    """The first place of each replica, by the replica's part of the coordinate."""
    return {_replica_of(place): place for place in reversed(saved)}


def _replica_of(coordinate: str) -> str:
    """The coordinate's part along the data axis, such as ``dp0``; the whole coordinate if it has none."""
    return next((part for part in coordinate.split(".") if part.startswith("dp")), coordinate)
