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

from lightning_parallel.comparison.differences import GRADIENT, differences, farthest_entry, largest
from lightning_parallel.comparison.evidence import Evidence
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
    """

    update: int
    unit: str
    phase: str
    what: str
    size: float

    def __str__(self) -> str:
        return f"{_WHERE[self.phase]} {self.unit}, in update {self.update}: {self.what}, {self.size:.1e}."


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
    unit, _, _ = first.parameter.rpartition(".")
    phase = "gradient" if first.order == GRADIENT else "update"
    return Beginning(first.update, unit or first.parameter, phase, first.name, first.size)


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
        sizes = [(each.size(least[place.what in GRADIENTS]), each) for each in seen]
        wrong = [(size, each) for size, each in sizes if not size <= tolerance]
        are_whole = all(each.right.shape == each.whole.shape for each in seen)
        if wrong:
            size, here = max(wrong, key=lambda each: each[0])
            phase = "backward" if place.what in GRADIENTS else "forward"
            what = f"{place.what} on rank {here.rank}" + f", {name_of(here.part, ranks[0])}" * (len(right) > 1)
            suspect = suspect or Beginning(update, place.unit, phase, what, size)
            if are_whole and place.what != OF_INPUT and not _is_part_of_sum(here, seen, tolerance):
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


def _is_part_of_sum(here: Seen, seen: Sequence[Seen], tolerance: float) -> bool:
    """Do ranks have other tensors each, and is their sum right? So it is where they share a head."""
    tensors = [each.tensor for each in seen if each.part == here.part and each.tensor is not None]
    if len(tensors) < 2 or any(farthest_entry(each, tensors[0], 1.0) == math.inf for each in tensors):
        return False
    scale = largest(here.right)
    alike = all(farthest_entry(each, tensors[0], scale) <= tolerance for each in tensors)
    return not alike and farthest_entry(torch.stack(tensors).sum(0), here.right, scale) <= tolerance


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


def name_of(part: int, notes: Notes) -> str:
    """The name of a microbatch among those of all replicas."""
    replica, k = divmod(part, notes.parts)
    if notes.parts == 1:
        return f"the share of replica {replica}"
    return f"microbatch {k}" + f" of replica {replica}" * (notes.replica[1] > 1)
