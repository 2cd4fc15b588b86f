"""Compares a rank's evidence with that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_parallel.comparison.evidence import Evidence
from lightning_parallel.ranks.shard import Shard

# What is smaller is compared with this: of numbers and buffers, and of others in units of their largest entry.
_ALMOST_ZERO = 1e-6
# In last bits of the largest entry among the gradients: what is smaller is what rounding leaves of zero, as in the
# gradient of a key's bias. Adam makes whole steps of it, so such a parameter's weights aren't compared.
_ROUNDING = 100

# What a Difference is of, in the order in which an update computes it.
LOSS, GRADIENT, WEIGHT, BUFFER, LOGGED = range(5)


@dataclass(frozen=True, order=True)
class Difference:
    """How far one number, or one tensor, is from that of one process.

    Attributes:
        update: in which it is, from 0.
        order: among what belongs to an update: what is computed first has the smallest.
        name: what it is.
        size: the largest difference of an entry, relative to the largest entry. NaN counts as infinite.
        parameter: the name of the parameter whose it is; empty for others.
    """

    update: int
    order: int
    name: str
    size: float
    parameter: str = ""


def differences(ranks: Sequence[Evidence], expected: Evidence) -> list[Difference]:
    """All that can be compared of what ranks have come to, what is computed first coming first. Of what several ranks
    hold it is the largest difference."""
    largest: dict[tuple[int, int, str], Difference] = {}
    for each in _by_rank(ranks, expected):
        place = each.update, each.order, each.name
        largest[place] = max(each, largest.get(place, each))
    return sorted(largest.values())


def _by_rank(ranks: Sequence[Evidence], expected: Evidence) -> Iterator[Difference]:
    # The loss of a replica is that of its share.
    losses = [sum(each) / len(each) for each in zip(*(rank.losses for rank in ranks), strict=False)]
    for update, loss in enumerate(expected.losses):
        yield Difference(update, LOSS, "loss", apart(losses[update] if update < len(losses) else math.nan, loss))
    for rank, found in enumerate(ranks):
        if len(found.gradients) != len(expected.gradients):
            count = f"number of updates of rank {rank}, {len(found.gradients)} for {len(expected.gradients)}"
            yield Difference(0, GRADIENT, count, math.inf)
    zeros: list[set[str]] = []  # by update: the parameters whose gradients have been zero, but for rounding
    for update, whole in enumerate(expected.gradients):
        rounding = _rounding(whole)
        zeros.append({name for name, tensor in whole.items() if _is_within(rounding, tensor)}.union(*zeros[-1:]))
        parts = [(rank.gradients[update], rank.shards) for rank in ranks if update < len(rank.gradients)]
        yield from _of_tensors(update, GRADIENT, "gradient of", parts, whole, rounding)
    for update, whole in enumerate(expected.weights):
        parts = [(rank.weights[update], rank.shards) for rank in ranks if update < len(rank.weights)]
        of_weights = _of_tensors(update, WEIGHT, "weight of", parts, whole)
        yield from (each for each in of_weights if each.parameter not in zeros[update])
    last = len(expected.gradients) - 1
    yield from _of_tensors(last, BUFFER, "buffer", [(rank.buffers, {}) for rank in ranks], expected.buffers)
    for name, value in expected.logged.items():
        logged = [rank.logged.get(name, math.nan) for rank in ranks]
        # A replica logs what its own share comes to, unless the module asks for the mean.
        size = min(apart(each, value) for each in (logged[0], sum(logged) / len(logged)))
        yield Difference(last, LOGGED, f"logged {name}", size)


def _of_tensors(
    update: int,
    order: int,
    what: str,
    parts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Shard]]],
    whole: Mapping[str, Tensor],
    rounding: float = 0.0,
) -> Iterator[Difference]:
    """``rounding``: where neither of two tensors has more, they aren't compared."""
    unit = 1.0 if order == BUFFER else max((largest(tensor) for tensor in whole.values()), default=0.0)
    for tensors, shards in parts:
        for name, tensor in tensors.items():
            if rounding and name in whole and _is_within(rounding, tensor, whole[name]):
                continue
            size = distance(tensor, whole.get(name), shards.get(name), _ALMOST_ZERO * unit)
            yield Difference(update, order, f"{what} {name}", size, "" if order == BUFFER else name)
    for name in sorted(whole.keys() - {name for tensors, _ in parts for name in tensors}):
        if largest(whole[name]):  # none is as good as one of zeros
            missing = f"{what} {name}, which no rank has"
            yield Difference(update, order, missing, math.inf, "" if order == BUFFER else name)


def _rounding(gradients: Mapping[str, Tensor]) -> float:
    """What rounding may leave of a gradient that is zero."""
    return max((_ROUNDING * torch.finfo(each.dtype).eps * largest(each) for each in gradients.values()), default=0.0)


def _is_within(rounding: float, *tensors: Tensor) -> bool:
    return all(largest(each) <= rounding and bool(each.isfinite().all()) for each in tensors)


def apart(one: float, other: float, least: float = _ALMOST_ZERO) -> float:
    """How far a number is from one process's, relative to that, but to ``least`` at least."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(abs(other), least)
    return math.inf if math.isnan(apart) else apart


def distance(tensor: Tensor, whole: Tensor | None, shard: Shard | None, least: float) -> float:
    """How far a tensor, or a shard of it, is from one process's ``whole``: the largest difference of an entry, relative
    to the largest entry of the whole, but to ``least`` at least."""
    if whole is None:  # zeros stand for a gradient that one process hasn't made
        return math.inf if largest(tensor) else 0.0
    part = whole if shard is None else shard.take(whole)
    return farthest_entry(tensor, part, max(largest(whole), least))


def farthest_entry(tensor: Tensor, right: Tensor, scale: float) -> float:
    """The largest difference of an entry, by ``scale``. NaN is equal to NaN, and infinitely far from numbers, as are
    tensors of other shapes."""
    if right.shape != tensor.shape:
        return math.inf
    if not right.numel():
        return 0.0
    tensor = tensor.to(right.dtype)
    same = (tensor == right) | (tensor.isnan() & right.isnan())
    apart = float((tensor - right).abs().masked_fill(same, 0.0).max())
    return 0.0 if apart == 0 else math.inf if not scale or math.isnan(apart) else apart / scale


def largest(tensor: Tensor) -> float:
    """The largest finite entry, without its sign."""
    return float(tensor.abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0
