"""What ranks must agree on: those that write one checkpoint, with each other; those that read one, with it. The first
rank compares what all send it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint.keys import parameter_of
from lightning_parallel.checkpoint.slices import Boxes
from lightning_parallel.ranks.writes import digest
from lightning_parallel.values import first_few

# -- ranks that save ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What the first rank has to know of a rank that saves.

    Attributes:
        shapes: shape and dtype of each of its tensors, by key.
        digests: what :func:`digests` returns for its model.
        scalars: for each optimizer its state that isn't a tensor, by parameter.
        param_groups: for each optimizer its groups: options, and the names of the parameters under "params".
        extra_state: what modules here keep besides parameters and buffers, by its name in the ``state_dict``.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    digests: dict[str, int]
    scalars: list[dict[str, dict[str, Any]]]
    param_groups: list[list[dict[str, Any]]]
    extra_state: dict[str, Any]


def agree(ranks: Sequence[RankSummary], order: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Join the summaries of all ranks, given in the order of ranks. Where several ranks hold one value, the lowest
    rank's is taken. ``order`` is that of the whole model's parameters; see :func:`merge_groups`.

    Returns:
        What trainer.pt says of the whole model, and the trained parameters that ranks hold as a whole.

    Raises:
        ValueError: ranks disagree about a shape, the number of optimizers, or the parameter groups.
        RuntimeError: copies of a parameter have drifted apart. The checkpoint would keep one of them.
    """
    shapes: dict[str, Any] = {}
    for key, shape in (item for rank in ranks for item in rank.shapes.items()):
        if shapes.setdefault(key, shape) != shape:
            raise ValueError(
                f"{key} is {shapes[key]} on one rank and {shape} on another: a checkpoint holds one tensor of each "
                f"name."
            )
    counts = [len(rank.param_groups) for rank in ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks have {counts} optimizers: configure_optimizers has to make the same on every rank."
        )
    groups = [merge_groups(list(copies), order) for copies in zip(*(r.param_groups for r in ranks), strict=True)]
    names = {name for of_one in groups for group in of_one for name in group["params"]}
    known: dict[str, int] = {}
    copies = [(name, number) for rank in ranks for name, number in rank.digests.items() if name in names]
    differing = [name for name, number in copies if known.setdefault(name, number) != number]
    if differing:
        raise RuntimeError(f"Copies of one parameter differ between ranks, nothing is saved: {first_few(differing)}.")
    scalars = [
        {name: values for copy in reversed(copies) for name, values in copy.items()}
        for copies in zip(*(rank.scalars for rank in ranks), strict=True)
    ]
    extra = {name: value for rank in reversed(ranks) for name, value in rank.extra_state.items()}
    return {"optimizer_scalars": scalars, "param_groups": groups, "extra_state": extra}, set(known)


def writers(ranks: Sequence[RankSummary], shared: Set[str]) -> dict[str, int]:
    """Which rank writes a tensor that belongs to a ``shared`` parameter: of those that hold it, the one that has the
    least to write so far. Others are written by every rank that holds a shard of them, or by their lowest holder.

    torch's planner would share them out as well. But it would share out buffers too, whose copies may differ; and the
    first rank would get the plans of all copies, which takes seconds with a thousand ranks.
    """
    holders: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        for key in rank.shapes:
            holders.setdefault(key, []).append(number)
    load = [0] * len(ranks)
    chosen: dict[str, int] = {}
    for key, numbers in sorted(holders.items(), key=lambda item: len(item[1])):  # first what one rank has alone
        if len(numbers) == 1 or parameter_of(key) in shared:
            chosen[key] = number = min(numbers, key=load.__getitem__)
            shape, dtype = ranks[number].shapes[key]
            load[number] += math.prod(shape) * dtype.itemsize
    return chosen


def digests(model: Mapping[str, Tensor]) -> dict[str, int]:
    """For each tensor that this rank holds as a whole, a number that differs between copies that have drifted apart.
    Shards are left out: they are no copies of each other."""
    return {name: int(digest(each)) for name, each in model.items() if not isinstance(each, DTensor | Boxes)}


def merge_groups(ranks: list[list[dict[str, Any]]], order: Sequence[str]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups as one process with the whole model would have them.

    Args:
        ranks: for each rank its groups: options, and the names of the parameters under "params".
        order: all names in the order of the model. Names that it lacks come last, rank after rank.
    """
    counts = [len(groups) for groups in ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The optimizers of the ranks have {counts} parameter groups: configure_optimizers has to make the same "
            f"groups on every rank, empty where a rank holds none of a group's parameters."
        )
    position = {name: place for place, name in enumerate(order)}
    merged = []
    for index, copies in enumerate(zip(*ranks, strict=True)):
        # A tensor is a learning rate for compiled or captured optimizers.
        first, *others = [
            {key: float(value) if isinstance(value, Tensor) else value for key, value in copy.items()}
            for copy in copies
        ]
        for other in others:
            for key in sorted(first.keys() | other.keys()):
                if key != "params" and (key not in first or key not in other or first[key] != other[key]):
                    raise ValueError(
                        f"parameter group {index} has {key}={first.get(key)!r} on one rank and {other.get(key)!r} on "
                        f"another: a checkpoint holds one value of each option."
                    )
        names = list(dict.fromkeys(name for copy in copies for name in copy["params"]))
        names.sort(key=lambda name: position.get(name, len(position)))
        merged.append({**copies[0], "params": names})
    return merged


# -- ranks that load ---------------------------------------------------------------------------------------------

Shapes = Mapping[str, Sequence[int]]  # of the model's tensors, by name


def refuse_misfits(path: str | os.PathLike[str], ranks: Iterable[Shapes], found: Shapes, *, strict: bool) -> None:
    """Refuse a checkpoint of another model.

    Args:
        ranks: what each rank holds of the model.
        found: what is in the checkpoint.
        strict: refuse one that lacks a tensor, or has one that no rank's model has.
    """
    problems: dict[str, None] = {}
    held: set[str] = set()
    for name, shape in (item for rank in ranks for item in rank.items()):
        held.add(name)
        if name in found and tuple(found[name]) != tuple(shape):
            problems[f"{name} has shape {tuple(found[name])} in it and {tuple(shape)} in the model"] = None
        elif name not in found and strict:
            problems[f"{name} is missing in it"] = None
    if strict:
        problems |= {f"{name} is in no rank's model": None for name in found if name not in held}
    if problems:
        raise ValueError(f"The checkpoint {os.fspath(path)} does not fit the model: {first_few(problems)}.")
