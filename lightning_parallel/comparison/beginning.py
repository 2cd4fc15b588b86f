"""Where a difference begins: the first unit that gets, returns or sends back something else than in one process.

One process runs the same microbatches, so the calls of units are compared one by one, and nothing is joined::

    one process     in   out   in   out   ...   gradient of out   gradient of in   ...   gradients   weights
    a rank                     in   out   ...   gradient of out   gradient of in   ...   gradients   weights

Between divided layers a rank has a piece of a tensor, and it isn't certain which one; or one summand of a gradient, as
where ranks share a head. The gradient of an input is only a part of it where units of other stages read the same. Such
a difference counts only if that of the next output that is whole is there as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_parallel.comparison.differences import GRADIENT, Difference, differences, farthest_entry, largest
from lightning_parallel.comparison.evidence import Evidence
from lightning_parallel.comparison.kinds import OWN_PART, kind_of
from lightning_parallel.comparison.units import GRADIENTS, OF_INPUT, OF_OUTPUT, OUTPUT, Notes, Place
from lightning_parallel.ranks.shard import Shard

_ALMOST_ZERO = 1e-6  # of the largest entry of all tensors of its kind

_WHERE = {
    "forward": "the forward of",
    "backward": "the backward of",
    "gradient": "a gradient of",
    "update": "the optimizer's step of",
}

Tensors = Mapping[Place, Tensor]  # of a microbatch


@dataclass(frozen=True)
class Beginning:
    """Where a difference begins.

    Attributes:
        update: in which it is, from 0.
        unit: the module's name.
        phase: "forward"; "backward"; "gradient", of a parameter, where what units get and return is right; "update", of
            a parameter whose gradient is right.
        what: the tensor, in words.
        size: as that of a :class:`~lightning_parallel.comparison.differences.Difference`.
        kind: what it looks like, in words; None if that can't be told.
    """

    update: int
    unit: str
    phase: str
    what: str
    size: float
    kind: str | None = None

    def __str__(self) -> str:
        looks = "" if self.kind is None else f"\nIt looks like this: {self.kind}."
        return f"{_WHERE[self.phase]} {self.unit}, in update {self.update}: {self.what}, {self.size:.1e}.{looks}"


@dataclass(frozen=True)
class Seen:
    """What a rank has of a tensor.

    Attributes:
        part: the microbatch's number among those of all replicas.
        tensor: None for a gradient that hasn't come.
        right: as large as ``tensor``.
        whole: the tensor of one process, of which ``right`` may be a piece.
    """

    rank: int
    part: int
    tensor: Tensor | None
    right: Tensor
    whole: Tensor

    def size(self, least: float) -> float:
        if self.tensor is None:
            return math.inf if largest(self.right) else 0.0
        return farthest_entry(self.tensor, self.right, max(largest(self.whole), least))


def where(
    ranks: Sequence[Evidence],
    alone: Evidence,
    noted: Sequence[Notes],
    noted_alone: Notes,
    update: int,
    tolerance: float,
) -> Beginning | None:
    """Where the differences between ranks and one process begin; None if it is in nothing that modules return or hold,
    or if microbatches have other sizes than in one process.

    Args:
        noted: what each rank has noted in the update in which the first difference is.
        noted_alone: what one process has, with the same microbatches.
    """
    if not _are_alike(noted, noted_alone.by_part()):
        return None  # units can't be compared, and of a parameter nobody could say that they are right
    in_unit = in_units(noted, noted_alone, update, tolerance)
    wrong = (each for each in differences(ranks, alone) if not each.size <= tolerance and each.parameter)
    first = next(wrong, None)
    if in_unit is not None or first is None or len({len(each.weights) for each in (*ranks, alone)}) > 1:
        return in_unit
    added = noted_alone.added if first.order == GRADIENT and first.update == update else []
    parts = {name_of(k, noted[0]): gradients for k, gradients in enumerate(added)}
    return in_parameter(ranks, alone, parts, first, tolerance)


def in_units(ranks: Sequence[Notes], alone: Notes, update: int, tolerance: float) -> Beginning | None:
    """Where a difference begins among what units get and return; None if there is none.

    Args:
        ranks: what each rank has noted in an update's batch.
        alone: what one process has, with the same microbatches.
    """
    right, found = alone.by_part(), [notes.by_part() for notes in ranks]
    least = {True: 0.0, False: 0.0}  # for gradients, and for values
    for place, tensor in (item for part in right for item in part.items()):
        of_gradients = place.what in GRADIENTS
        least[of_gradients] = max(least[of_gradients], _ALMOST_ZERO * largest(tensor))
    suspect: Beginning | None = None
    for place in dict.fromkeys(place for part in right for place in part):
        seen = [*_seen(place, ranks, found, right)]
        wrong = [
            (size, each, _kind(each, seen, place, right, ranks[0], tolerance))
            for each in seen
            if not (size := each.size(least[place.what in GRADIENTS])) <= tolerance
        ]
        are_whole = all(each.right.shape == each.whole.shape for each in seen)
        if wrong:
            # What can be explained says more than what is largest.
            explained = (each for each in wrong if each[2])
            size, here, kind = next(explained, max(wrong, key=lambda each: each[0]))
            phase = "backward" if place.what in GRADIENTS else "forward"
            what = f"{place.what} on rank {here.rank}" + f", {name_of(here.part, ranks[0])}" * (len(right) > 1)
            suspect = suspect or Beginning(update, place.unit, phase, what, size, kind)
            if are_whole and place.what != OF_INPUT and kind != OWN_PART:
                return suspect
        elif seen and are_whole and place.what in (OUTPUT, OF_OUTPUT):
            suspect = None
    return suspect


def _are_alike(ranks: Sequence[Notes], right: Sequence[Tensors]) -> bool:
    """Have the microbatches the same sizes as in one process, and is there something to compare in each?"""
    found: dict[int, set[tuple[Place, torch.Size]]] = {}
    for notes in ranks:
        for k, part in enumerate(notes.by_part(), notes.replica[0] * notes.parts):
            found.setdefault(k, set()).update((place, tensor.shape) for place, tensor in part.items())
    shapes = [{(place, tensor.shape) for place, tensor in part.items()} for part in right]
    return found.keys() == {*range(len(right))} and all(found[k] & each for k, each in enumerate(shapes))


def _seen(
    place: Place, ranks: Sequence[Notes], found: Sequence[Sequence[Tensors]], right: Sequence[Tensors]
) -> Iterator[Seen]:
    for rank, (notes, parts) in enumerate(zip(ranks, found, strict=True)):
        for k, tensors in enumerate(parts):
            part = notes.replica[0] * notes.parts + k
            whole, tensor = right[part].get(place) if part < len(right) else None, tensors.get(place)
            if whole is None:
                continue
            if tensor is not None:
                piece = _piece(tensor, whole, notes)
                if piece is not None:
                    yield Seen(rank, part, tensor, piece, whole)
            elif place.what == OF_OUTPUT and place._replace(what=OUTPUT) in tensors:
                yield Seen(rank, part, None, whole, whole)


def _kind(
    here: Seen, seen: Sequence[Seen], place: Place, right: Sequence[Tensors], notes: Notes, tolerance: float
) -> str | None:
    if here.tensor is None:
        return "none has come"
    others = {f"that of {name_of(k, notes)}": part[place] for k, part in enumerate(right) if place in part}
    beside = [each for each in seen if each.part == here.part]
    others |= {f"that of rank {each.rank}": each.right for each in beside}
    ranks = [each.tensor for each in beside if each.tensor is not None]
    return kind_of(here.tensor, here.right, tolerance, others=others, ranks=ranks)


def _piece(tensor: Tensor, whole: Tensor, notes: Notes) -> Tensor | None:
    """The part of a whole that a rank with a tensor of this shape has; None if that can't be told. Fused parts are
    divided one by one, so of several ways the nearest is taken."""
    dims = [dim for dim, size in enumerate(whole.shape) if tensor.dim() == whole.dim() and tensor.shape[dim] != size]
    if len(dims) != 1:
        return whole if tensor.shape == whole.shape else None
    size, (index, count) = whole.shape[dims[0]], notes.piece
    ways = [parts for parts in {(size,), *notes.fused} if sum(parts) == size]
    shards = [Shard(tuple(whole.shape), dims[0], parts, index, count) for parts in ways]
    pieces = [shard.take(whole) for shard in shards if shard.size == tensor.shape[dims[0]]]
    return min(pieces, key=lambda piece: farthest_entry(tensor, piece, 1.0), default=None)


def in_parameter(
    ranks: Sequence[Evidence],
    alone: Evidence,
    parts: Mapping[str, Mapping[str, Tensor]],
    first: Difference,
    tolerance: float,
) -> Beginning:
    """What the first parameter that differs looks like: its gradient, or its change in an update.

    Args:
        parts: by microbatch, what it has added to the gradients of one process.
        first: of a parameter.
    """
    name, of_gradient = first.parameter, first.order == GRADIENT

    def part_of(evidence: Evidence) -> Tensor | None:
        if of_gradient:
            return evidence.gradients[first.update].get(name)
        before = evidence.weights[first.update - 1] if first.update else evidence.begin
        after = evidence.weights[first.update].get(name)
        return None if after is None else after - before[name]

    whole = part_of(alone)
    shards = [rank.shards.get(name) for rank in ranks]
    found = {rank: tensor for rank, each in enumerate(ranks) if (tensor := part_of(each)) is not None}
    kind = None
    if whole is not None and found:
        right, zeros = {rank: _own(whole, shards[rank]) for rank in found}, torch.zeros_like(whole)
        here = max(found, key=lambda rank: farthest_entry(found[rank], right[rank], 1.0))
        kind = kind_of(
            found[here],
            right[here],
            tolerance,
            others={f"that of rank {rank}": tensor for rank, tensor in right.items() if shards[rank] is not None},
            ranks=[tensor for rank, tensor in found.items() if shards[rank] is None],
            parts={key: _own(part.get(name, zeros), shards[here]) for key, part in parts.items()},
        )
    unit, _, _ = name.rpartition(".")
    return Beginning(first.update, unit or name, "gradient" if of_gradient else "update", first.name, first.size, kind)


def _own(whole: Tensor, shard: Shard | None) -> Tensor:
    return whole if shard is None else shard.take(whole)


def name_of(part: int, notes: Notes) -> str:
    """The name of a microbatch among those of all replicas."""
    replica, k = divmod(part, notes.parts)
    if notes.parts == 1:
        return f"the share of replica {replica}"
    return f"microbatch {k}" + f" of replica {replica}" * (notes.replica[1] > 1)
