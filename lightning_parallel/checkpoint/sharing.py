"""Decides who writes what several ranks hold: replicas share the work of a save."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lightning_parallel.checkpoint.agreement import RankSummary
from lightning_parallel.checkpoint.optimizers import parts_of
from lightning_parallel.checkpoint.reading import MODEL


def parameter_of(key: str) -> str | None:
    """The name of the parameter or buffer that a tensor of a checkpoint belongs to; None for other tensors."""
    if key.startswith(MODEL):
        return key.removeprefix(MODEL)
    parts = parts_of(key)
    return None if parts is None else parts[1]


def writers(ranks: Sequence[RankSummary], copies: Sequence[Collection[str]]) -> dict[str, int]:
    """Which rank writes a parameter and its optimizer states: of its holders the one that has least to write so far.

    ``copies`` are, for each rank, the parameters that it holds as a whole and that equal those of other ranks. Tensors
    that aren't in the result are written by every rank that holds a shard of them, or by their lowest holder.
    """
    keys = [_by_parameter(rank.shapes) for rank in ranks]
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(copies):
        for name in names:
            holders.setdefault(name, []).append(rank)
    shared = {
        name: of_name
        for name, of_name in holders.items()
        if len(of_name) > 1 and all(keys[rank].get(name) == keys[of_name[0]].get(name) for rank in of_name)
    }
    sizes = [{name: sum(map(_bytes, shapes.values())) for name, shapes in of_rank.items()} for of_rank in keys]
    load = [sum(size for name, size in of_rank.items() if name not in shared) for of_rank in sizes]
    chosen: dict[str, int] = {}
    for name in sorted(shared, key=lambda name: (-sizes[shared[name][0]][name], name)):
        rank = min(shared[name], key=lambda rank: load[rank])
        load[rank] += sizes[rank][name]
        chosen[name] = rank
    return chosen


def _by_parameter(shapes: Mapping[str, tuple]) -> dict[str, dict[str, tuple]]:
    grouped: dict[str, dict[str, tuple]] = {}
    for key, shape in shapes.items():
        name = parameter_of(key)
        if name is not None:
            grouped.setdefault(name, {})[key] = shape
    return grouped


def _bytes(shape: tuple) -> int:
    size, dtype = shape
    return math.prod(size) * int(dtype.itemsize)
